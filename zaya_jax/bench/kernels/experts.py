"""`zaya bench experts`: memory and FLOPs of the expert dispatch, as compiled.

Letters: P rows, D model width, E experts, F expert width.
"""

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from pallas_kernels.grouped_matmul.blocked import ROUNDING, block_sizes
from zaya_jax.model.experts import apply_experts, expert_weights
from zaya_jax.text_tables import format_bytes, name_column, number_column


def run(*, num_rows: int = 16_384, num_experts: int = 16, width: int = 2048) -> None:
    """Compiles the experts' forward and backward pass, and prints XLA's own figures next to the minimum.

    Args:
      num_rows: number of tokens, P.
      num_experts: number of experts, E.
      width: model width D and expert width F; the default is ZAYA1-8B's.
    """
    # 4 bytes per float32.
    rows_bytes = 4 * num_rows * width
    what = f"{num_rows:,} tokens, {num_experts} experts of {width}, float32, {jax.default_backend()}"
    columns = map(number_column, ("temporaries", "routed rows", "ratio", "rows x experts\nx width"))
    table = Table(name_column("pass"), *columns, title=f"memory: {what}")
    columns = ("per row,\nMFLOP", "max\nrows", "max\nTFLOP", "useful\nTFLOP", "ratio")
    title = f"operations: each expert's rows are padded by less than {ROUNDING}"
    operations = Table(name_column("pass"), *map(number_column, columns), title=title)
    for name, passes in (("forward", 1), ("forward and backward", 3)):
        compiled = compile_experts(num_rows, num_experts, width, backward=name != "forward")
        memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
        assert memory is not None, "this backend reports no memory analysis"
        assert cost is not None, "this backend reports no cost analysis"
        temporary = memory.temp_size_in_bytes
        table.add_row(
            name,
            format_bytes(temporary),
            format_bytes(rows_bytes),
            f"{temporary / rows_bytes:.2f}",
            format_bytes(rows_bytes * num_experts),
        )
        # XLA's cost analysis counts the body of each loop once, whatever its trip count.
        # One iteration of each block size contributes to XLA's count.
        row = cost["flops"] / sum(block_sizes(num_rows))
        # Worst case: every expert's group is one row above a multiple.
        rows = num_rows + num_experts * (ROUNDING - 1)
        # Three matrices per expert, gate, up and down, with two FLOPs per entry and row.
        useful = 2.0 * num_rows * width * width * 3 * passes
        operations.add_row(
            name,
            f"{row / 1e6:,.2f}",
            f"{rows:,}",
            f"{row * rows / 1e12:,.3f}",
            f"{useful / 1e12:,.3f}",
            f"{row * rows / useful:.3f}",
        )
    console = Console()
    console.print(table)
    console.print(operations)


def compile_experts(num_rows: int, num_experts: int, width: int, *, backward: bool) -> jax.stages.Compiled:
    """Compiles the experts of one layer for this machine from shapes alone."""

    def forward(x_PD, weights, experts_P, probs_P):
        return apply_experts(x_PD, experts_P, probs_P, expert_weights(weights, x_PD.dtype))

    def gradient(x_PD, weights, experts_P, probs_P):
        out_PD, backward = jax.vjp(lambda x, w: forward(x, w, experts_P, probs_P), x_PD, weights)
        # Any gradient serves for compiling, and the output has the right shape.
        return out_PD, backward(out_PD)

    rows = jax.ShapeDtypeStruct((num_rows, width), jnp.float32)
    weights = {
        "gate_up_proj": jax.ShapeDtypeStruct((num_experts, width, 2, width), jnp.float32),
        "down_proj": jax.ShapeDtypeStruct((num_experts, width, width), jnp.float32),
    }
    experts = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    probs = jax.ShapeDtypeStruct((num_rows,), jnp.float32)
    return jax.jit(gradient if backward else forward).lower(rows, weights, experts, probs).compile()
