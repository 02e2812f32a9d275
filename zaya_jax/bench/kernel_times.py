"""`zaya bench kernels`: each Pallas kernel against XLA's form and the best of other libraries here.

On a GPU at ZAYA1-8B's shapes in bfloat16; on a CPU, where kernels are interpreted, at toy size: that
shows that the benchmark runs, and its times mean nothing.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from pallas_kernels.catalogue import SIZES, Case, Work, cases
from zaya_jax.bench.measure import best_seconds
from zaya_jax.bench.other_libraries import TorchResult, others
from zaya_jax.tables import name_column, number_column


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """What this device was measured to reach, in this run."""

    flops: float
    bandwidth: float

    def share(self, work: Work, seconds: float) -> float:
        """Of the time that the work takes at these rates."""
        return max(work.flops / self.flops, work.num_bytes / self.bandwidth) / seconds


def run(*, rounds: int) -> None:
    """Prints a row for each operation, pass and implementation.

    Args:
      rounds: timings of each, of which the best counts.

    Raises:
      ValueError: if an implementation's results are not those of the first.
    """
    on_cpu = jax.default_backend() == "cpu"
    size = "toy" if on_cpu else "zaya1_8b"
    console = Console(soft_wrap=True, highlight=False)
    device = jax.devices()[0]
    console.print(f"{device.device_kind}, jax {jax.__version__}, sizes {size}, bfloat16; best of {rounds}")
    if on_cpu:
        console.print("kernels are interpreted on a CPU: these times show only that the benchmark runs")
    ceilings = measure_ceilings(on_cpu, rounds)
    console.print(
        f"ceilings of this run: {ceilings.flops / 1e12:.3g} TFLOP/s, {ceilings.bandwidth / 1e12:.3g} TB/s"
    )
    columns = map(number_column, ("ms", "TFLOP/s", "TB/s", "ceiling", "differs"))
    table = Table(name_column("operation, and by"), *columns, box=box.SIMPLE_HEAD, padding=0)
    found = cases(SIZES[size])
    for case in found:
        # A seed from the system: what only holds for one set of numbers fails in some later run.
        arguments = jax.jit(case.make)(jax.random.key(np.random.SeedSequence().generate_state(1)[0]))
        for name, calls, work in passes(case, arguments):
            table.add_row(f"{case.name}, {name}")
            for by, *figures in compare(case, calls, work, ceilings, rounds):
                table.add_row(f"  {by}", *figures)
    console.print(table)
    for case in found:
        for other in others(case.name):
            if other.absent:
                console.print(f"{case.name}: {other.name} is absent: {other.absent}")


def passes(case: Case, arguments: tuple[Any, ...]) -> list[tuple[str, dict[str, Callable[[], Any]], Work]]:
    """Forward, and gradients with their forward pass: calls by implementation, ours first; the work."""
    forward, both = {}, {}
    for name in case.implementations:
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
    work = Work(case.forward.flops + case.backward.flops, case.forward.num_bytes + case.backward.num_bytes)
    return [("forward", forward, case.forward), ("gradients", both, work)]


def compare(
    case: Case, calls: dict[str, Callable[[], Any]], work: Work, ceilings: Ceilings, rounds: int
) -> list[list[str]]:
    """Times implementations of one thing in turn, after their results were held against the first's.

    Raises:
      ValueError: if results differ.
    """
    results = {name: call() for name, call in calls.items()}
    ours, *_ = results.values()
    differences = {name: difference(result, ours) for name, result in results.items()}
    wrong = [f"{name} by {found:.1e}" for name, found in differences.items() if not found < case.tolerance]
    if wrong:
        raise ValueError(
            f"{case.name}: results differ from the kernel's: {', '.join(wrong)}; "
            f"{case.tolerance:.1e} is allowed"
        )
    times = best_seconds(calls, rounds=rounds)
    return [
        [
            name,
            f"{seconds * 1e3:,.3f}",
            f"{work.flops / seconds / 1e12:.3g}",
            f"{work.num_bytes / seconds / 1e12:.3g}",
            f"{ceilings.share(work, seconds):.1%}",
            f"{differences[name]:.1e}",
        ]
        for name, seconds in times.items()
    ]


def difference(results: Any, expected: Any) -> float:
    """The largest relative norm of a difference, over the arrays that both have.

    Others give fewer: None stands in the place of one, and what is missing at the end is not looked at.
    """
    pairs = zip(_leaves(results), _leaves(expected), strict=False)
    return max(_relative(jnp.asarray(a), jnp.asarray(b)) for a, b in pairs if a is not None)


def _leaves(results: Any) -> list[Any]:
    if isinstance(results, TorchResult):
        return results.arrays()
    return jax.tree.leaves(results, is_leaf=lambda x: x is None)


@jax.jit
def _distance(result: jax.Array, expected: jax.Array) -> tuple[jax.Array, jax.Array]:
    result, expected = (x.astype(jnp.float32).ravel() for x in (result, expected))
    return jnp.linalg.norm(result - expected), jnp.linalg.norm(expected)


def _relative(result: jax.Array, expected: jax.Array) -> float:
    distance, size = map(float, _distance(result, expected))
    return distance / size if size else distance


def measure_ceilings(on_cpu: bool, rounds: int) -> Ceilings:
    """The rates of a product of two square bfloat16 matrices, and of reading and writing a large array."""
    size, length = (256, 2**20) if on_cpu else (8192, 2**29)
    matrix = jnp.ones((size, size), jnp.bfloat16)
    array = jnp.ones((length,), jnp.float32)
    # x + 1 reads 4 bytes and writes 4 for each entry; XLA could leave out a plain copy.
    product, copy = jax.jit(lambda x: x @ x), jax.jit(lambda x: x + 1)
    times = best_seconds({"product": lambda: product(matrix), "copy": lambda: copy(array)}, rounds=rounds)
    return Ceilings(2 * size**3 / times["product"], 8 * length / times["copy"])
