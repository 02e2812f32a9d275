"""`zaya plan kernels`: what each Pallas kernel needs of a GPU, forward and backward, by its compiler."""

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.stages import Lowered
from rich import box
from rich.console import Console
from rich.table import Column, Table

from pallas_kernels.catalogue import SIZES, Case, Work, cases
from pallas_kernels.choice import choice_for
from zaya_jax.parallel.mesh import data_mesh, replicated
from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.gpus import Device
from zaya_jax.plan.rocm.code_objects import Kernel
from zaya_jax.plan.rocm.compiler import Job, compile_program
from zaya_jax.pytree import abstract
from zaya_jax.tables import name_column, number_column

SIZE = "zaya1_8b"
"""Whose shapes are compiled."""


@dataclasses.dataclass(frozen=True)
class KernelReport:
    """A kernel of ours as the compiler made it.

    Attributes:
      name: by which it was launched.
      kernel: its resources.
      has_products: whether it must use matrix instructions.
    """

    name: str
    kernel: Kernel
    has_products: bool

    def problems(self, device: Device) -> list[str]:
        """What is wrong with it, in words; nothing for a sound kernel."""
        found = self.kernel.problems(device)
        if self.has_products and not self.kernel.matrix_instructions:
            found.append("no matrix instructions")
        return found


def plan_kernels(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Compiles all kernels and prints what they need.

    Raises:
      ValueError: if one spills, uses scratch, takes too much local memory or no matrix instructions.
    """
    if overrides:
        raise ValueError(f'"{overrides[0]}" is not an option of kernels; see zaya plan --help')
    device = find_device(options.device)
    device.need_core()
    console = Console(soft_wrap=True, highlight=False)
    what = f"compiling the kernels for {device.name}"
    with console.status(what) as status:
        reports = compile_kernels(
            device,
            time_limit=options.time_limit,
            progress=lambda seconds: status.update(f"{what}: {seconds:.0f} s"),
        )
    console.print(resources_table(reports, device))
    console.print(loops_table(reports, device))
    console.print(work_table(device))
    console.print(choices_table())
    wrong = {report.kernel.name: report.problems(device) for report in reports}
    wrong = [f"{name}: {', '.join(problems)}" for name, problems in wrong.items() if problems]
    if wrong:
        raise ValueError("; ".join(wrong))


def compile_kernels(device: Device, **options: Any) -> list[KernelReport]:
    """All kernels of `pallas_kernels.catalogue`, forward and backward, at ZAYA1-8B's shapes.

    Args:
      device: to compile for.
      **options: of `compile_program`.

    Raises:
      ValueError: if the program cannot be compiled, or a kernel is not in it.
    """
    job = Job(
        program="zaya_jax.plan.kernel_report:lower_kernels",
        arguments={"size": SIZE},
        cluster=Cluster(device=device, nodes=1, gpus_per_node=1),
    )
    found = compile_program(job, **options).kernels
    ours = {name: products for case in _cases() for name, products in case.kernels.items()}
    reports = [
        KernelReport(name, kernel, products)
        for name, products in ours.items()
        for kernel in found
        if re.fullmatch(rf"{name}(_\d+)?", kernel.name)  # XLA numbers those of one name
    ]
    missing = set(ours) - {report.name for report in reports}
    if missing:
        raise ValueError(f"the compiled program has no kernel {', '.join(sorted(missing))}")
    return reports


def lower_kernels(devices: Sequence[Any], *, size: str) -> Lowered:
    """One program that runs every case of the catalogue with its gradients.

    Args:
      devices: abstract ones will do; the first is taken.
      size: name of the sizes.
    """
    found = cases(SIZES[size])
    everywhere = replicated(data_mesh(devices[:1]))

    def run(arguments):
        return [case.with_gradients("pallas")(*a) for case, a in zip(found, arguments, strict=True)]

    arguments = abstract([jax.eval_shape(case.make, jax.random.key(0)) for case in found], everywhere)
    return jax.jit(run, out_shardings=everywhere).lower(arguments)


def _cases() -> list[Case]:
    return cases(SIZES[SIZE], jnp.bfloat16)


def resources_table(reports: list[KernelReport], device: Device) -> Table:
    """What each kernel takes of a compute unit, and whether that is sound; a row a kernel."""
    title = f"kernels for {device.name} at {SIZE}'s shapes; waves are those that a SIMD can hold"
    columns = map(number_column, ("VGPRs", "spills", "scratch", "LDS, B", "waves", "MFMA"))
    columns = (Column("kernel", no_wrap=True), *columns, name_column(""))
    table = Table(*columns, title=title, box=box.SIMPLE_HEAD, padding=0)
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


def loops_table(reports: list[KernelReport], device: Device) -> Table:
    """What a wave does in each kernel's main loop, and how far it can use its matrix unit; a row a kernel."""
    columns = map(number_column, ("MFMA", "cycles", "VALU", "cycles", "LDS", "memory", "barr.", "share"))
    table = Table(
        Column("kernel", no_wrap=True),
        *columns,
        title="what a wave does in one round of its main loop",
        caption="share: of the matrix units' time, at most, by cycles of both kinds; with one wave a SIMD "
        "they take turns. Waiting for memory, LDS and barriers comes on top",
        box=box.SIMPLE_HEAD,
        padding=0,
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
    """What each operation must do at least, and how long that takes by the device's peaks."""
    columns = map(number_column, ("GFLOP", "MB", "bound, µs"))
    table = Table(name_column("operation"), "pass", *columns, "by", title="least work")
    for case in _cases():
        for name, work in (("forward", case.forward), ("backward", case.backward)):
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
    """Seconds that the work takes at least, and what makes it so."""
    compute, memory = work.flops / device.matrix_flops, work.num_bytes / device.memory_bandwidth
    return (compute, "matrix units") if compute > memory else (memory, "memory")


def choices_table() -> Table:
    """What `implementation=None` takes on AMD's GPUs."""
    title = "taken where none is named, on ROCm"
    table = Table(name_column("operation"), "implementation", name_column("rests on"), title=title)
    for case in _cases():
        choice = choice_for(case.name, "rocm")
        table.add_row(case.name, choice.implementation, choice.basis)
    return table
