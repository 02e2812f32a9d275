"""`zaya plan kernels`: GPU resources of each Pallas kernel, forward and backward, as compiled."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered
from rich.console import Console
from rich.table import Column, Table

from pallas_kernels.catalogue import SIZES, Case, Work, cases
from pallas_kernels.choice import choice_for
from zaya_jax.errors import UserError
from zaya_jax.parallel.mesh import data_mesh, replicated
from zaya_jax.plan.compiled.kernel_execution import check_packages, print_executions
from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.gpus import Device
from zaya_jax.plan.rocm.code_objects import Kernel
from zaya_jax.plan.rocm.compiler import Job, compile_program
from zaya_jax.plan.rocm.launches.lowering import described_gpu
from zaya_jax.pytree import abstract
from zaya_jax.text_tables import dense_table, name_column, number_column

SIZE = "zaya1_8b"
"""Name of the catalog's sizes to compile."""
DTYPES = ("bfloat16", "float32")
"""Dtypes of the operands of products for which kernels are compiled."""


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """A compiled kernel of ours.

    Attributes:
      name: name by which it is launched.
      kernel: its resources.
      has_products: whether it must use matrix instructions.
    """

    name: str
    kernel: Kernel
    has_products: bool

    def problems(self, device: Device) -> list[str]:
        """Returns descriptions of problems; empty if there are none."""
        results = self.kernel.problems(device)
        if self.has_products and not self.kernel.matrix_instructions:
            results.append("no matrix instructions")
        return results


def plan_kernels(options: argparse.Namespace) -> None:
    """Compiles all kernels for bfloat16 and float32, and prints their resources; with --execute, runs them.

    Raises:
      UserError: if a kernel spills, uses scratch, too much local memory or no matrix instructions, or rounds
        float32 factors to xf32; with --execute, if a kernel fails a check of the emulator, or its results are
        not those of the reference.
    """
    device = find_device(options.device)
    # Fail before minutes of compiling if the compiler does not support the GPU.
    device.need_core()
    console = Console(soft_wrap=True, highlight=False)
    # Another question: what the kernels compute, not what resources they need.
    if options.execute:
        check_packages()
        print_executions(console, device, size=options.size, dtypes=DTYPES)
        return
    wrong = []
    for dtype in DTYPES:
        what = f"compiling the kernels of {dtype} for {device.name}"
        with console.status(what) as status:
            reports = compile_kernels(
                device,
                dtype=dtype,
                time_limit=options.time_limit,
                progress=lambda seconds, what=what: status.update(f"{what}: {seconds:.0f} s"),
            )
        console.print(resources_table(reports, device, dtype=dtype))
        console.print(loops_table(reports, device, dtype=dtype))
        problems = {report.kernel.name: report.problems(device) for report in reports}
        wrong += [f"{dtype} {name}: {', '.join(results)}" for name, results in problems.items() if results]
    console.print(work_table(device))
    console.print(choices_table())
    # The command fails only after the tables of all kernels have been printed.
    if wrong:
        raise UserError("; ".join(wrong))


def compile_kernels(device: Device, *, dtype: str = "bfloat16", **options: Any) -> list[KernelReport]:
    """Compiles all kernels of `pallas_kernels.catalogue`, forward and backward, at ZAYA1-8B's shapes.

    Args:
      device: GPU to compile for.
      dtype: dtype of the operands of products, "bfloat16" or "float32".
      **options: options of `compile_program`.

    Raises:
      UserError: if the program cannot be compiled, or a kernel is missing from it.
    """
    job = Job(
        program="zaya_jax.plan.compiled.kernel_report:lower_kernels",
        arguments={"size": SIZE, "dtype": dtype},
        cluster=Cluster(device=device, nodes=1, gpus_per_node=1),
    )
    results = compile_program(job, **options).kernels
    ours = {name: products for case in _cases() for name, products in case.kernels.items()}
    reports = [
        KernelReport(name, kernel, products)
        for name, products in ours.items()
        for kernel in results
        if re.fullmatch(rf"{name}(_\d+)?", kernel.name)  # XLA numbers kernels of the same name
    ]
    # Otherwise a kernel with another name would silently be missing from the report.
    missing = set(ours) - {report.name for report in reports}
    if missing:
        raise UserError(f"the compiled program has no kernel {', '.join(sorted(missing))}")
    return reports


def lower_kernels(devices: Sequence[Any], *, size: str, dtype: str) -> Lowered:
    """Lowers one program that runs every case of the catalog with its gradients.

    Args:
      devices: devices, which may be abstract; the first is used.
      size: name of the sizes.
      dtype: dtype of the operands of products.
    """
    results = cases(SIZES[size], dtype)
    # One device suffices: kernels do not depend on the cluster.
    everywhere = replicated(data_mesh(devices[:1]))

    def run(arguments):
        return [case.with_kernels()(*a) for case, a in zip(results, arguments, strict=True)]

    # Shapes alone, because the program is compiled and never run.
    arguments = abstract([jax.eval_shape(case.make, jax.random.key(0)) for case in results], everywhere)
    with described_gpu():
        return jax.jit(run, out_shardings=everywhere).lower(arguments)


def _cases() -> list[Case]:
    return cases(SIZES[SIZE], jnp.bfloat16)


def resources_table(reports: list[KernelReport], device: Device, *, dtype: str = "bfloat16") -> Table:
    """Resources of each kernel per compute unit, and its problems."""
    title = f"{dtype} kernels for {device.name} at {SIZE}'s shapes; waves: maximum per SIMD"
    columns = ("VGPRs", "spills", "scratch", "LDS, B", "waves", "MFMA", name_column(""))
    table = dense_table(Column("kernel", no_wrap=True), *columns, title=title)
    for report in reports:
        kernel = report.kernel
        table.add_row(
            kernel.name,
            f"{kernel.vgprs}",
            f"{kernel.vgpr_spills + kernel.sgpr_spills}",
            f"{kernel.scratch_bytes}",
            f"{kernel.lds_bytes:,}",
            f"{kernel.waves_per_simd(device)}",
            f"{kernel.matrix_instructions}",
            ", ".join(report.problems(device)) or "sound",
        )
    return table


def loops_table(reports: list[KernelReport], device: Device, *, dtype: str = "bfloat16") -> Table:
    """Work of a wave in each kernel's main loop, and the maximum use of its matrix unit."""
    table = dense_table(
        Column("kernel", no_wrap=True),
        *("MFMA", "cycles", "VALU", "cycles", "LDS", "memory", "barr.", "share"),
        title=f"{dtype}: work of a wave in one iteration of its main loop",
        caption="share: maximum utilization of the matrix units by cycles; with one wave per SIMD matrix and "
        "vector instructions alternate. Stalls on memory, LDS and barriers come on top",
    )
    for report in reports:
        loop = report.kernel.loop
        if loop is None:
            table.add_row(report.kernel.name, *("",) * 8)
            continue
        work = loop.matrix, loop.matrix_cycles, loop.vector, loop.vector_cycles
        waits = loop.local, loop.memory, loop.barriers
        share = loop.matrix_share(report.kernel.waves_per_simd(device))
        table.add_row(report.kernel.name, *(f"{count:,}" for count in (*work, *waits)), f"{share:.0%}")
    return table


def work_table(device: Device) -> Table:
    """Minimum work of each operation, and its time at the device's peaks."""
    columns = map(number_column, ("GFLOP", "MB", "bound, µs"))
    table = Table(name_column("operation"), "pass", *columns, "by", title="minimum work")
    for case in _cases():
        for name, work in (("forward", case.forward), ("backward", case.backward)):
            # An operation without a gradient has no work in the backward pass.
            if not work.flops:
                continue
            seconds, resource = bound(work, device)
            table.add_row(
                case.name,
                name,
                f"{work.flops / 1e9:,.1f}",
                f"{work.num_bytes / 1e6:,.1f}",
                f"{seconds * 1e6:,.0f}",
                resource,
            )
    return table


def bound(work: Work, device: Device) -> tuple[float, str]:
    """Returns the minimum seconds of the work, and the resource that determines them."""
    compute, memory = work.flops / device.matrix_flops, work.num_bytes / device.memory_bandwidth
    return (compute, "matrix units") if compute > memory else (memory, "memory")


def choices_table() -> Table:
    """Implementations that `implementation=None` selects on AMD GPUs."""
    title = "default implementations on ROCm"
    table = Table(name_column("operation"), "implementation", name_column("basis"), title=title)
    for case in _cases():
        choice = choice_for(case.name, "rocm")
        table.add_row(case.name, choice.implementation, choice.basis)
    return table
