"""Resources of compiled GPU kernels, read from the files that XLA:ROCm writes.

Registers, spills, scratch and static local memory are in the notes of the code objects (ELF notes of type 32
in MessagePack: LLVM's "User Guide for AMDGPU Backend", code object metadata). Launch sizes and dynamic local
memory are in XLA's list of thunks. Matrix instructions are counted in the optimized LLVM code, and the main
loop in the machine code (`zaya_jax.plan.rocm.machine_code`).
"""

import dataclasses
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from pallas_kernels.emulator.code_object import kernel_notes, read_code_object
from zaya_jax.plan.gpus import Device
from zaya_jax.plan.rocm.machine_code import Loop, main_loop

LAUNCH = re.compile(
    r"Kernel\s+\[[^\]]*\] (\S+) grid: \[([^\]]*)\] threads: \[([^\]]*)\]\s+shared_memory: (\d+) bytes"
)
KERNEL_DEFINITION = re.compile(r"^define [^\n]*amdgpu_kernel void @\"?([^\"(]+)\"?\(", re.MULTILINE)
MATRIX_CALL = re.compile(r"call [^\n]*@llvm\.amdgcn\.s?mfmac?\.([\w.]+)\(")
"""Its group is the shape and the type of the factors, such as "f32.32x32x4.xf32"."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      name: XLA's name.
      vgprs: vector registers per lane, including accumulators.
      sgprs: scalar registers per wave.
      vgpr_spills: vector registers spilled to memory.
      sgpr_spills: scalar registers spilled to memory.
      scratch_bytes: scratch memory per lane in bytes.
      lds_bytes: local memory per workgroup in bytes, static and dynamic.
      threads: threads per workgroup; 0 if no launch was found.
      grid: number of workgroups; 0 if no launch was found.
      matrix_instructions: matrix instructions in the code, not executions.
      xf32_instructions: those that round float32 factors to 10 mantissa bits.
      loop: main loop; None if the kernel has no loop.
    """

    name: str
    vgprs: int
    sgprs: int
    vgpr_spills: int
    sgpr_spills: int
    scratch_bytes: int
    lds_bytes: int
    threads: int
    grid: int
    matrix_instructions: int
    xf32_instructions: int = 0
    loop: Loop | None = None

    def problems(self, device: Device) -> list[str]:
        """Returns descriptions of problems; empty if there are none."""
        core = device.need_core()
        messages = []
        if self.vgpr_spills or self.sgpr_spills:
            messages.append(f"spills {self.vgpr_spills} vector and {self.sgpr_spills} scalar registers")
        if self.xf32_instructions:
            messages.append(f"{self.xf32_instructions} products of float32 numbers rounded to xf32")
        if self.scratch_bytes:
            messages.append(f"{self.scratch_bytes} bytes of scratch per lane")
        if self.lds_bytes > core.lds_bytes:
            messages.append(f"{self.lds_bytes:,} bytes of LDS, of {core.lds_bytes:,}")
        return messages

    def waves_per_simd(self, device: Device) -> int:
        """Maximum number of waves in flight per vector unit, limited by registers and local memory."""
        core = device.need_core()
        granule = core.register_granule
        # The hardware allocates registers in multiples of the granule.
        registers = max(-(-self.vgprs // granule) * granule, granule)
        by_registers = min(core.max_waves, core.registers // registers)
        if not self.lds_bytes or not self.threads:
            return by_registers
        waves = -(-self.threads // core.wave_size)
        # Workgroups per compute unit by local memory, spread over its vector units.
        by_lds = core.lds_bytes // self.lds_bytes * waves / core.simds
        # A workgroup that fits does run, even if it has less than one wave for each vector unit.
        return min(by_registers, max(int(by_lds), 1 if self.lds_bytes <= core.lds_bytes else 0))


@dataclasses.dataclass(frozen=True)
class LaunchSize:
    """Launch of a kernel: workgroups, threads per workgroup, and bytes of dynamic local memory."""

    grid: int
    threads: int
    lds_bytes: int


def read_kernels(code_folder: pathlib.Path, dump_folder: pathlib.Path) -> list[Kernel]:
    """Returns all kernels of one compilation, sorted by name.

    Args:
      code_folder: folder of XLA:ROCm's code objects (`*.hsaco`) and their LLVM code (`*_opt.ll`).
      dump_folder: XLA's dump of the same compilation.
    """
    launches = _launches(dump_folder)
    matrix_calls = _matrix_calls(code_folder)
    kernels = {}
    for path in files_in_order(code_folder, "*.hsaco"):
        data = path.read_bytes()
        # One file may have several kernels: fusions that XLA compiles together.
        codes = read_code_object(data)
        for notes in kernel_notes(data):
            name = notes[".name"]
            loop = main_loop(codes[name].code)
            kernels[name] = _kernel(notes, launches.get(name, LaunchSize(0, 0, 0)), matrix_calls, loop)
    return [kernels[name] for name in sorted(kernels)]


def files_in_order(code_folder: pathlib.Path, pattern: str) -> list[pathlib.Path]:
    """Returns files of a compilation, oldest first, the program's own kernels last.

    Args:
      code_folder: folder that XLA:ROCm has written its code to.
      pattern: glob pattern of the files' names.
    """
    # XLA of jax 0.12 compiles fusions once to choose their settings and again for the program. A name may
    # denote two different kernels in the two passes, and the names of files contain random numbers.
    return sorted(code_folder.glob(pattern), key=lambda path: (path.stat().st_mtime_ns, path.name))


def _kernel(
    notes: Mapping[str, Any], launch: LaunchSize, matrix_calls: Mapping[str, list[str]], loop: Loop | None
) -> Kernel:
    calls = matrix_calls.get(notes[".name"], [])
    return Kernel(
        name=notes[".name"],
        vgprs=notes[".vgpr_count"],
        sgprs=notes[".sgpr_count"],
        vgpr_spills=notes[".vgpr_spill_count"],
        sgpr_spills=notes[".sgpr_spill_count"],
        scratch_bytes=notes[".private_segment_fixed_size"],
        # The notes have only the static part; the dynamic part is an argument of the launch.
        lds_bytes=notes[".group_segment_fixed_size"] + launch.lds_bytes,
        threads=launch.threads,
        grid=launch.grid,
        matrix_instructions=len(calls),
        xf32_instructions=sum(call.endswith("xf32") for call in calls),
        loop=loop,
    )


def _launches(dump_folder: pathlib.Path) -> dict[str, LaunchSize]:
    """Launches by kernel; of several the one with the most local memory."""
    launches: dict[str, LaunchSize] = {}
    for path in sorted(dump_folder.glob("*thunk_sequence.txt")):
        for name, grid, threads, lds in LAUNCH.findall(path.read_text()):
            # Only products matter: how a grid is divided into axes changes no resource.
            launch = LaunchSize(math.prod(sizes_of(grid)), math.prod(sizes_of(threads)), int(lds))
            if name not in launches or launches[name].lds_bytes < launch.lds_bytes:
                launches[name] = launch
    return launches


def sizes_of(numbers: str) -> list[int]:
    """Returns the sizes along the axes of a grid, or of a workgroup, as `LAUNCH` finds them."""
    return [int(number) for number in numbers.split(",")]


def _matrix_calls(code_folder: pathlib.Path) -> dict[str, list[str]]:
    """Matrix instructions in the optimized code of each kernel; XLA writes one file per kernel."""
    calls = {}
    for path in files_in_order(code_folder, "*_opt.ll"):
        text = path.read_text(errors="replace")
        for name in KERNEL_DEFINITION.findall(text):
            calls[name] = MATRIX_CALL.findall(text)
    return calls
