"""`zaya plan kernels --execute`: the machine code of every kernel, executed on the emulator of gfx942."""

import collections
import dataclasses
import importlib.util
import time
from collections.abc import Iterable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from pallas_kernels.catalogue import SIZES, Case, cases
from pallas_kernels.emulator import Counts, EmulationError
from pallas_kernels.emulator.counts import LINE_BYTES
from zaya_jax.errors import UserError
from zaya_jax.plan.compiled.kernel_cycles import KernelCycles, kernel_cycles
from zaya_jax.plan.gpus import Device
from zaya_jax.plan.rocm.launches.compiler import LaunchCompiler
from zaya_jax.plan.rocm.launches.execution import EmulatedLaunches, ExecutedLaunch
from zaya_jax.platform.shell import install_command
from zaya_jax.text_tables import dense_table, name_column

PACKAGES = ("tinygrad", "flatbuffers")
"""Packages of the extra `emulator`: decoder tables, and the serialization of lowered programs."""
EXECUTED_SIZES = ("toy", "wide")
"""Catalog sizes that a CPU executes in minutes."""
TOLERANCE_FACTORS = {"bfloat16": 1.0, "float32": 2.0**-12}
"""Bounds of errors in units of the catalog's tolerance, which is for bfloat16. Mantissas of float32 have 16
bits more; sums, which are float32 for both, cost up to four of them. A product in xf32 exceeds the bound."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelExecution:
    """All launches of one kernel in one operation.

    Attributes:
      name: name of the kernel.
      launches: number of launches.
      array_bytes: bytes of operands and results, each once per launch.
      minimum_lines: cache lines that the accessed bytes of each launch fill.
      counts: what all launches executed.
      seconds: time of the emulation.
    """

    name: str
    launches: int
    array_bytes: int
    minimum_lines: int
    counts: Counts
    seconds: float

    def cycles(self, device: Device) -> KernelCycles:
        """Returns the cycles for which the kernel occupies the units of a GPU, in all its launches."""
        counts = self.counts
        return kernel_cycles(
            counts.instructions, local_cycles=counts.local_cycles, array_bytes=self.array_bytes, device=device
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationExecution:
    """An operation with its gradients, executed on machine code.

    Attributes:
      name: name of the operation.
      kernels: its kernels in the order of their first launch.
      error: largest relative norm of the difference to the reference, over results and gradients.
      tolerance: bound of the error.
      minimum_bytes: minimum of bytes moved, forward and backward.
      seconds: time for compilation and execution.
    """

    name: str
    kernels: tuple[KernelExecution, ...]
    error: float
    tolerance: float
    minimum_bytes: int
    seconds: float

    @property
    def problem(self) -> str | None:
        """Description of an error beyond the tolerance; None without. NaN is beyond any."""
        if self.error <= self.tolerance:
            return None
        return f"the results differ by {self.error:.1e} from the reference's, more than {self.tolerance:.1e}"


def check_packages() -> None:
    """Checks that the packages of the emulator are installed.

    Raises:
      UserError: if one is not.
    """
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UserError(
            f"--execute needs {' and '.join(missing)}, not installed here: {install_command('emulator')}"
        )


def execute_operation(case: Case, executor: EmulatedLaunches, dtype: str) -> OperationExecution:
    """Compiles an operation with its gradients, executes it and compares the results with the reference.

    Args:
      case: the operation.
      executor: executor of its launches, which counts memory transactions.
      dtype: dtype of the operands of products.

    Raises:
      UserError: if a kernel cannot be compiled.
      EmulationError: if a check of the emulator fails; the message names the kernel.
    """
    # The same numbers as those of benchmarks of the catalog.
    arguments = case.make(jax.random.key(0))
    began = time.perf_counter()
    # Results are awaited inside: callbacks run when the arrays are computed.
    with executor.launches():
        results = jax.block_until_ready(jax.jit(case.with_kernels())(*arguments))
    seconds = time.perf_counter() - began
    expected = _reference(case, arguments)
    return OperationExecution(
        name=case.name,
        kernels=tuple(_by_kernel(executor.executed)),
        error=float(np.max([largest_error(each, expected) for each in results])),
        tolerance=case.tolerance * TOLERANCE_FACTORS[dtype],
        minimum_bytes=len(case.forms) * (case.forward.num_bytes + case.backward.num_bytes),
        seconds=seconds,
    )


def _reference(case: Case, arguments: tuple) -> object:
    """Results and gradients of the implementation without kernels, from the same numbers in float32."""
    # In bfloat16 the reference would have roundings too, and the error would not be the kernels'.
    return jax.jit(case.with_gradients("xla"))(*jax.tree.map(_wide, arguments))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def largest_error(results: object, expected: object) -> float:
    """Returns the largest relative norm of a difference over all float arrays; NaN if one is NaN."""
    # Integers have gradients of no elements.
    pairs = zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True)
    errors = [_relative_error(a, b) for a, b in pairs if jnp.issubdtype(a.dtype, jnp.floating)]
    # Unlike max of Python, this is NaN if any is.
    return float(np.max(errors))


def _relative_error(result: jax.Array, expected: jax.Array) -> float:
    result_64, expected_64 = np.asarray(result, np.float64), np.asarray(expected, np.float64)
    size = np.linalg.norm(expected_64)
    # Zeros have no relative error; the absolute one is as strict for results of size one.
    return float(np.linalg.norm(result_64 - expected_64) / (size if size > 0 else 1.0))


def _by_kernel(executed: Sequence[ExecutedLaunch]) -> Iterator[KernelExecution]:
    # A kernel is launched several times in a loop, or for several arrays.
    groups = collections.defaultdict(list)
    for launch in executed:
        groups[launch.name].append(launch)
    for name, launches in groups.items():
        counts = [launch.execution.counts for launch in launches]
        yield KernelExecution(
            name=name,
            launches=len(launches),
            array_bytes=sum(launch.array_bytes for launch in launches),
            minimum_lines=sum(each.minimum_lines for each in counts),
            counts=sum(counts, start=Counts()),
            seconds=sum(launch.seconds for launch in launches),
        )


def print_executions(console: Console, device: Device, *, size: str, dtypes: Iterable[str]) -> None:
    """Executes all operations for each dtype, and prints four tables per dtype.

    Raises:
      UserError: after all tables, if a kernel fails a check of the emulator, or the error of an operation
        exceeds its tolerance.
    """
    executor, wrong = EmulatedLaunches(LaunchCompiler(device), count_memory=True), []
    for dtype in dtypes:
        done = []
        with console.status("") as status:
            for case in cases(SIZES[size], dtype):
                status.update(f"executing the kernels of {dtype} {case.name}")
                try:
                    done.append(execute_operation(case, executor, dtype))
                # Other operations are executed all the same.
                except EmulationError as error:
                    wrong.append(f"{dtype} {case.name}: {error}")
        console.print(instructions_table(done, size=size, dtype=dtype))
        console.print(memory_table(done, dtype=dtype))
        console.print(cycles_table(done, device, dtype=dtype))
        console.print(results_table(done, size=size, dtype=dtype))
        wrong += [f"{dtype} {each.name}: {each.problem}" for each in done if each.problem]
    # Last, so that one failure does not hide the tables of other kernels.
    if wrong:
        raise UserError("; ".join(wrong))


def instructions_table(operations: Sequence[OperationExecution], *, size: str, dtype: str) -> Table:
    """Executed instructions of each kernel by class, divergence, and the time of the emulation."""
    table = dense_table(
        Column("kernel", no_wrap=True),
        *("launches", "MFMA", "VALU", "scalar", "LDS", "memory", "active", "s"),
        title=f"{dtype} kernels at the sizes {size!r}: instructions executed by all waves",
        caption="active: share of lanes that are active in instructions of lanes; s: time of the emulation",
    )
    for kernel in _kernels(operations):
        executed = kernel.counts.by_class()
        # Loads of arguments by scalar instructions use the same memory.
        memory = executed["device memory"] + executed["scalar memory"]
        counts = [executed[kind] for kind in ("matrix", "vector", "scalar", "local memory")]
        table.add_row(
            kernel.name,
            f"{kernel.launches}",
            *(f"{count:,}" for count in (*counts, memory)),
            f"{kernel.counts.active_share:.0%}",
            f"{kernel.seconds:.2f}",
        )
    return table


def memory_table(operations: Sequence[OperationExecution], *, dtype: str) -> Table:
    """Memory transactions of each kernel against the least possible, and bank conflicts."""
    table = dense_table(
        Column("kernel", no_wrap=True),
        *("arrays, kB", "least, kB", "lines, kB", "LDS cycles", "conflicts"),
        title=f"{dtype}: memory transactions",
        caption="arrays: operands and results, each once; least: cache lines that the accessed bytes fill; "
        "lines: cache lines that the accesses touch, once per instruction of a wave, many of them in caches; "
        "conflicts: LDS cycles lost to bank conflicts",
    )
    for kernel in _kernels(operations):
        lines = [n * LINE_BYTES for n in (kernel.minimum_lines, kernel.counts.device_lines)]
        table.add_row(
            kernel.name,
            *(f"{num_bytes / 1e3:,.1f}" for num_bytes in (kernel.array_bytes, *lines)),
            f"{kernel.counts.local_cycles:,}",
            f"{kernel.counts.local_conflicts:,}",
        )
    return table


def cycles_table(operations: Sequence[OperationExecution], device: Device, *, dtype: str) -> Table:
    """Lower bound of each kernel's time by its busiest unit, and the largest use of the matrix units."""
    table = dense_table(
        Column("kernel", no_wrap=True),
        *("MFMA", "VALU", "LDS", "HBM", "bound, µs", "MFMA share"),
        name_column("busiest"),
        title=f"{dtype}: cycles of each unit of {device.name} by executed instructions",
        caption="if the work is spread evenly over all units; HBM: each array once. MFMA share: largest "
        "utilization of the matrix units. Latencies and barriers come on top",
    )
    for kernel in _kernels(operations):
        cycles = kernel.cycles(device)
        table.add_row(
            kernel.name,
            *(f"{each:,.0f}" for each in dataclasses.astuple(cycles)),
            f"{cycles.bound / device.need_core().clock * 1e6:,.2f}",
            f"{cycles.matrix_share:.0%}",
            cycles.busiest,
        )
    return table


def _kernels(operations: Sequence[OperationExecution]) -> Iterator[KernelExecution]:
    for operation in operations:
        yield from operation.kernels


def results_table(operations: Sequence[OperationExecution], *, size: str, dtype: str) -> Table:
    """Largest error of each operation against the reference, and bytes moved against the minimum."""
    table = dense_table(
        Column("operation", no_wrap=True),
        *("instructions", "distinct", "lines, kB", "minimum, kB", "error", "bound", "s"),
        title=f"{dtype} operations with gradients at the sizes {size!r}",
        caption="error: largest relative norm of the difference to the implementation without kernels in "
        "float32. minimum: each array once. s: time for compiling and executing",
    )
    for each in operations:
        counts = [kernel.counts for kernel in each.kernels]
        table.add_row(
            each.name,
            f"{sum(each.instructions.total() for each in counts):,}",
            # Kernels share most instructions: their numbers do not add up.
            f"{max(len(each.instructions) for each in counts):,}",
            f"{sum(each.device_lines for each in counts) * LINE_BYTES / 1e3:,.1f}",
            f"{each.minimum_bytes / 1e3:,.1f}",
            f"{each.error:.1e}",
            f"{each.tolerance:.1e}",
            f"{each.seconds:.1f}",
        )
    return table
