"""`zaya bench kernels`: each Pallas kernel against XLA's implementation and other installed libraries.

On a GPU it uses ZAYA1-8B's shapes in bfloat16. On a CPU, where kernels are interpreted, it uses toy sizes:
that tests the benchmark, and the times mean nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from pallas_kernels.catalogue import SIZES, Case, Work, cases
from zaya_jax.bench.kernels.gemm import product_times
from zaya_jax.bench.kernels.memory_passes import pass_time
from zaya_jax.bench.kernels.other_libraries import TorchResult, others
from zaya_jax.bench.measure import repeated_seconds
from zaya_jax.errors import UserError
from zaya_jax.plan.arithmetic import Gemm
from zaya_jax.text_tables import dense_table, name_column


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """FLOP/s and bytes/s that this device reaches in this run."""

    flops: float
    bandwidth: float

    def share(self, work: Work, seconds: float) -> float:
        """Returns the minimum time of the work at these rates, relative to the measured time."""
        # At best products and memory traffic overlap completely, so that the longer of the two counts.
        return max(work.flops / self.flops, work.num_bytes / self.bandwidth) / seconds


def run(*, rounds: int) -> None:
    """Prints a row for each operation, pass and implementation.

    Args:
      rounds: number of timings of each, of which the best counts.

    Raises:
      UserError: if the results of two implementations differ.
    """
    on_cpu = jax.default_backend() == "cpu"
    # Interpreted kernels are too slow for the sizes of the model.
    size = "toy" if on_cpu else "zaya1_8b"
    console = Console(soft_wrap=True, highlight=False)
    device = jax.devices()[0]
    console.print(f"{device.device_kind}, jax {jax.__version__}, sizes {size}, bfloat16; best of {rounds}")
    if on_cpu:
        console.print("kernels are interpreted on a CPU: these times only show that the benchmark works")
    ceilings = measure_ceilings(on_cpu)
    console.print(
        f"ceilings of this run: {ceilings.flops / 1e12:.3g} TFLOP/s, {ceilings.bandwidth / 1e12:.3g} TB/s"
    )
    columns = ("ms", "TFLOP/s", "TB/s", "ceiling", "differs")
    table = dense_table(name_column("operation, and by"), *columns)
    all_cases = cases(SIZES[size])
    for case in all_cases:
        # A random seed: an error that depends on the data shows up in some run.
        arguments = jax.jit(case.make)(jax.random.key(np.random.SeedSequence().generate_state(1)[0]))
        for name, calls, work in passes(case, arguments):
            table.add_row(f"{case.name}, {name}")
            for by, *figures in compare(case, calls, work, ceilings, rounds):
                table.add_row(f"  {by}", *figures)
    console.print(table)
    for case in all_cases:
        for other in others(case.name):
            if other.absent:
                console.print(f"{case.name}: {other.name} is absent: {other.absent}")


def passes(case: Case, arguments: tuple[Any, ...]) -> list[tuple[str, dict[str, Callable[[], Any]], Work]]:
    """Returns the forward pass, and the gradients with their forward pass: name, calls by implementation, and
    work.

    Our implementation comes first.
    """
    forward, both = {}, {}
    for name in case.implementations:
        # The arguments are bound outside of `jax.jit`: within it they would be constants of the program.
        forward[name] = functools.partial(
            jax.jit(functools.partial(case.function, implementation=name)), *arguments
        )
        both[name] = functools.partial(jax.jit(case.with_gradients(name)), *arguments)
    for other in others(case.name):
        if not other.absent:
            forward[other.name], gradients = other.make(*arguments)
            both |= {} if gradients is None else {other.name: gradients}
    if not case.num_differentiated:
        return [("forward", forward, case.forward)]
    # The timed call of gradients includes its forward pass.
    work = Work(case.forward.flops + case.backward.flops, case.forward.num_bytes + case.backward.num_bytes)
    return [("forward", forward, case.forward), ("gradients", both, work)]


def compare(
    case: Case, calls: dict[str, Callable[[], Any]], work: Work, ceilings: Ceilings, rounds: int
) -> list[list[str]]:
    """Checks that all implementations agree with the first one, then times them alternately.

    Raises:
      UserError: if results differ.
    """
    # Compare all results before timing, so that no wrong implementation gets a time.
    results = {name: call() for name, call in calls.items()}
    # A dict keeps its order, in which our implementation comes first.
    ours, *_ = results.values()
    differences = {name: difference(result, ours) for name, result in results.items()}
    wrong = [
        f"{name} by {norm:.1e}"
        for name, norm in differences.items()
        # Not `>=`, with which a difference of NaN would pass.
        if not norm < case.tolerance
    ]
    if wrong:
        raise UserError(
            f"{case.name}: results differ from the kernel's: {', '.join(wrong)}; "
            f"{case.tolerance:.1e} is allowed"
        )
    times = repeated_seconds([functools.partial(_repeat, call) for call in calls.values()], rounds=rounds)
    return [
        [
            name,
            f"{seconds * 1e3:,.3f}",
            f"{work.flops / seconds / 1e12:.3g}",
            f"{work.num_bytes / seconds / 1e12:.3g}",
            f"{ceilings.share(work, seconds):.1%}",
            f"{differences[name]:.1e}",
        ]
        for name, seconds in zip(calls, times, strict=True)
    ]


def _repeat(call: Callable[[], Any], times: int) -> Any:
    """Queues calls, so that the device does not wait for the next one, and returns the last result."""
    for _ in range(times):
        result = call()  # replaces the previous one, whose memory is free again
    return result


def difference(results: Any, expected: Any) -> float:
    """Returns the largest relative norm of a difference over the arrays that both results have.

    Other libraries return fewer arrays: None marks a missing one, and missing trailing arrays are ignored.
    """
    pairs = zip(_leaves(results), _leaves(expected), strict=False)
    return max(_relative(jnp.asarray(a), jnp.asarray(b)) for a, b in pairs if a is not None)


def _leaves(results: Any) -> list[Any]:
    # Convert torch's tensors here, outside the timed calls.
    if isinstance(results, TorchResult):
        return results.arrays()
    # JAX would drop None from the tree; here it stands for a result that a library does not return.
    return jax.tree.leaves(results, is_leaf=lambda x: x is None)


@jax.jit
def _distance(result: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A sum of squares in bfloat16 would stop growing after some hundred terms.
    result, expected = (x.astype(jnp.float32).ravel() for x in (result, expected))
    return jnp.linalg.norm(result - expected), jnp.linalg.norm(expected)


def _relative(result: jax.Array, expected: jax.Array) -> float:
    distance, size = map(float, _distance(result, expected))
    # For expected zeros there is no relative difference.
    return distance / size if size else distance


def measure_ceilings(on_cpu: bool, dtype: str = "bfloat16") -> Ceilings:
    """Measures the rates of a square product of a dtype, and of reading and writing a large array."""
    # Sizes that saturate the device; larger arrays than any cache.
    side, array_bytes = (1024, 2**26) if on_cpu else (8192, 2**31)
    (product,) = product_times([Gemm(name="ceiling", rows=side, depth=side, columns=side)], dtype)
    return Ceilings(product.rate, pass_time("scale", array_bytes).bandwidth)
