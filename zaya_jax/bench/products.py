"""`zaya bench gemm`: how fast a ZAYA1 step's matrix products are, which sizes are bad, what helps."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.machine import check_outputs, this_machine, write_json
from zaya_jax.bench.measure import free_device_memory, repeated_seconds
from zaya_jax.options import Parser, load_config
from zaya_jax.plan.arithmetic import Gemm, gemms
from zaya_jax.plan.command import config_of_phase
from zaya_jax.plan.measured import ProductTime, ProductTimes
from zaya_jax.tables import name_column, number_column

PRESET = "configs/zaya1_8b.py"
NUM_GPUS = 1024
"""That the recipe was trained on ([ZAYA1-8B] appendix A)."""
ACCEPTED = Gemm(name="as AMD accepts nodes by", rows=8192, depth=8192, columns=8192)
PROBE = Gemm(name="probe", rows=512, depth=512, columns=512)
CALL_SECONDS = 1.0
"""Products that would take longer, by the probe's rate, are left out."""
TILE = 256
"""Sides of a block of the result that one compute unit makes; what is left of a side makes a block too."""
BAD_SHARE = 0.5
"""Of the best product's rate, below which a product is bad."""
WORTH = 0.05
"""Of the time, that a change must save to be advised."""
RAGGED_COST = 1.25
"""Times as long that a product with a row more may take."""
PADDED, DOUBLED, RAGGED = "padded", "2 x rows", "1 row more"
VARIANTS = (PADDED, DOUBLED, RAGGED)
OF_EXPERTS = "of all experts"
"""Ends the names of products whose rows are as many as tokens chose an expert."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench gemm` with the words behind it.

    Raises:
      ValueError: for what cannot be measured.
    """
    parser = _parser()
    options, overrides = parser.parse_with_fields(argv)
    check_outputs(json_file=options.json)
    config = config_of_phase(load_config(options.config, overrides))
    if options.gpus < 1 or config.data.batch_size % options.gpus:
        raise ValueError(f"--gpus is {options.gpus}; it must divide the batch of {config.data.batch_size}")
    if not options.call_seconds > 0:
        raise ValueError(f"--call-seconds is {options.call_seconds}; it must be above 0")
    console = Console(soft_wrap=True, highlight=False)
    with console.status("timing products") as status:
        found, left_out = measure(
            [*gemms(config, options.gpus), ACCEPTED],
            config.execution.dtype,
            call_seconds=options.call_seconds,
            progress=lambda name: status.update(f"timing {name}"),
        )
    write_json(options.json, dataclasses.asdict(found))
    console.print(table(found))
    if left_out:
        console.print(
            f"left out, for they would take longer than {options.call_seconds:g} s here or more memory than "
            f"is free: {', '.join(left_out)}"
        )
    for sentence in advice(found):
        console.print(f"- {sentence}")


def measure(
    products: Sequence[Gemm],
    dtype: str,
    *,
    call_seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> tuple[ProductTimes, list[str]]:
    """Times products and what may be better in their place; and names those that are too large for here.

    Args:
      products: of a step.
      dtype: of their matrices.
      call_seconds: as `CALL_SECONDS`.
      progress: is told what is being timed.
    """
    (probed,) = product_times([PROBE], dtype)
    times, left_out = [], []
    for product in products:
        progress(product.name)
        together = [product, *variants(product)]
        num_bytes = sum(needed_bytes(each, dtype) for each in together)
        if product.flops / probed.rate > call_seconds or num_bytes > free_device_memory() // 2:
            left_out.append(product.name)
        else:
            times += product_times(together, dtype)
    return ProductTimes(machine=this_machine(), dtype=dtype, products=tuple(times or [probed])), left_out


def variants(product: Gemm) -> Iterator[Gemm]:
    """The same product as it may be made better, or get worse.

    With all sides multiples of `TILE`, unless they are; with twice the rows, where a setting gives it those;
    with a row more, where rows come as tokens choose their experts.
    """
    if product == ACCEPTED:
        return
    sides = {name: getattr(product, name) for name in ("rows", "depth", "columns")}
    padded = {name: math.ceil(side / TILE) * TILE for name, side in sides.items()}
    if padded != sides:
        yield dataclasses.replace(product, name=f"{product.name}, {PADDED}", **padded)
    if rows_setting(product.name):
        yield dataclasses.replace(product, name=f"{product.name}, {DOUBLED}", rows=2 * product.rows)
    if product.name.endswith(OF_EXPERTS):
        yield dataclasses.replace(product, name=f"{product.name}, {RAGGED}", rows=product.rows + 1)


def rows_setting(name: str) -> str:
    """What gives a product more rows; "" for those of the optimiser, whose sides are the weights'."""
    if name.startswith("Newton-Schulz"):
        return ""
    return "a larger execution.loss_chunk" if name.startswith("logits") else "a larger micro-batch"


def needed_bytes(product: Gemm, dtype: str) -> int:
    """Of both matrices and their product."""
    sides = product.rows * product.depth + product.depth * product.columns + product.rows * product.columns
    return product.count * sides * jnp.dtype(dtype).itemsize


def product_times(products: Sequence[Gemm], dtype: str) -> list[ProductTime]:
    """Times products of random matrices in turn: zeros take less power, and run at a higher clock."""
    calls = [_call(product, dtype) for product in products]
    return [
        ProductTime(**dataclasses.asdict(product), seconds=seconds)
        for product, seconds in zip(products, repeated_seconds(calls), strict=True)
    ]


def _call(product: Gemm, dtype: str) -> Callable[[int], jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    shapes = (product.rows, product.depth), (product.depth, product.columns)
    left, right = (
        jax.random.normal(key, (product.count, *shape), dtype)
        for key, shape in zip(keys, shapes, strict=True)
    )
    multiply = jax.jit(jnp.matmul)
    return lambda times: [multiply(left, right) for _ in range(times)][-1]


def table(found: ProductTimes) -> Table:
    """Products and their rates, and what each variant does to the time that a row takes."""
    # In two lines, and names above sizes: else a terminal of 80 columns has two letters left for names.
    headers = ("\n".join(name.rsplit(" ", 1)) for name in ("TFLOP/s", "of the best", *VARIANTS))
    title = f"products in {found.dtype} on {found.machine.device}"
    caption = "on the right: time of a row over that of the product itself"
    rows = Table(name_column("product"), *map(number_column, headers), title=title, caption=caption)
    named = {each.name: each for each in found.products}
    for each in _own(found):
        size = f"{each.rows:,} x {each.depth:,} x {each.columns:,}"
        size = f"{each.count:,} of {size}" if each.count > 1 else size
        others = [named.get(f"{each.name}, {name}") for name in VARIANTS]
        ratios = ["" if other is None else f"{_time_a_row(each, other):.2f}" for other in others]
        rows.add_row(
            f"{each.name}\n  {size}", f"{each.rate / 1e12:.3g}", f"{each.rate / found.best_rate:.0%}", *ratios
        )
    return rows


def _own(found: ProductTimes) -> list[ProductTime]:
    return [each for each in found.products if each.name.rpartition(", ")[2] not in VARIANTS]


def _time_a_row(product: ProductTime, variant: ProductTime) -> float:
    """Over the product's own. Rows of padding are nobody's: only those that were asked for count."""
    rows = product.rows if variant.name.endswith(PADDED) else variant.rows
    return variant.seconds / rows / (product.seconds / product.rows)


def advice(found: ProductTimes) -> list[str]:
    """What would make bad products better, as measured; one sentence for each of those."""
    named = {each.name: each for each in found.products}
    own = _own(found)
    sentences = [_advise(each, named, found) for each in own if each.rate < BAD_SHARE * found.best_rate]
    for each in own:
        ragged = named.get(f"{each.name}, {RAGGED}")
        if ragged and _time_a_row(each, ragged) > RAGGED_COST:
            sentences.append(
                f"{each.name}: a row more takes {_time_a_row(each, ragged):.1f} times as long: pad each "
                f"expert's rows to a multiple of {TILE}, or take an implementation that does"
            )
    return sentences or [f"no product is below {BAD_SHARE:.0%} of the best one's rate"]


def _advise(product: ProductTime, named: dict[str, ProductTime], found: ProductTimes) -> str:
    begins = f"{product.name} reaches {product.rate / found.best_rate:.0%} of the best product's rate"
    padded, doubled = (named.get(f"{product.name}, {name}") for name in (PADDED, DOUBLED))
    if padded and (ratio := _time_a_row(product, padded)) < 1 - WORTH:
        size = f"{padded.rows:,} x {padded.depth:,} x {padded.columns:,}"
        return f"{begins}; padded to {size} it takes {1 - ratio:.0%} less time"
    if doubled and (ratio := _time_a_row(product, doubled)) < 1 - WORTH:
        setting = rows_setting(product.name)
        return f"{begins}; with {setting}, twice its rows, a row takes {1 - ratio:.0%} less time"
    return f"{begins}; nothing that was tried helps: it is bound by memory, or its library has no tile for it"


def _parser() -> Parser:
    parser = Parser(
        "bench gemm",
        "Times the matrix products of a step as a GPU of the cluster has them, beside 8,192 cubed, by "
        "which AMD accepts nodes; says which sizes are bad and whether padding or a larger micro-batch "
        "helps. zaya plan --measured takes the JSON.",
        (
            "zaya bench gemm --json=gemm.json",
            "zaya bench gemm --config=configs/tiny.py --gpus=1",
            "zaya bench gemm --gpus=256 --config.execution.dtype=bfloat16",
        ),
    )
    parser.add_argument(
        "--config", default=PRESET, metavar="FILE", help="whose products (default: %(default)s)"
    )
    parser.add_argument(
        "--gpus", type=int, default=NUM_GPUS, help="that share the run's batch (default: %(default)s)"
    )
    parser.add_argument(
        "--call-seconds",
        type=float,
        default=CALL_SECONDS,
        metavar="SECONDS",
        help="products that would take longer are left out (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all times")
    return parser
