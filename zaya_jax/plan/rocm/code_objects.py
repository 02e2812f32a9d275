"""What each compiled GPU kernel needs, read from the files that XLA:ROCm leaves.

Registers, spills, scratch and static local memory stand in the notes of the code objects (ELF notes of
type 32 in MessagePack: LLVM's "User Guide for AMDGPU Backend", code object metadata). How a kernel is
launched, and the local memory it asks for then, stands in XLA's list of thunks. Matrix instructions
are counted in the optimised LLVM code, the main loop in the machine code (`zaya_jax.plan.rocm.machine_code`).
"""

import dataclasses
import pathlib
import re
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import msgpack

from zaya_jax.plan.gpus import Device
from zaya_jax.plan.rocm.machine_code import Loop, kernel_code, main_loop

NOTE_OWNER = b"AMDGPU\0\0"
METADATA_NOTE = 32
LAUNCH = re.compile(
    r"Kernel\s+\[[^\]]*\] (\S+) grid: \[([^\]]*)\] threads: \[([^\]]*)\]\s+shared_memory: (\d+) bytes"
)
KERNEL_DEFINITION = re.compile(r"^define [^\n]*amdgpu_kernel void @\"?([^\"(]+)\"?\(", re.MULTILINE)
MATRIX_CALL = re.compile(r"call [^\n]*@llvm\.amdgcn\.s?mfma[c.]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kernel:
    """A compiled kernel.

    Attributes:
      name: XLA's.
      vgprs: vector registers of a lane, accumulators included.
      sgprs: scalar registers of a wave.
      vgpr_spills: vector registers that did not fit and live in memory.
      sgpr_spills: scalar registers that did not fit.
      scratch_bytes: memory of a lane for what has no register.
      lds_bytes: local memory of a workgroup, static and asked for at the launch.
      threads: of a workgroup; 0 if no launch was found.
      grid: workgroups; 0 if no launch was found.
      matrix_instructions: in the code, not executions.
      loop: that most of its time goes into; None if it has no loop.
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
    loop: Loop | None = None

    def problems(self, device: Device) -> list[str]:
        """What is wrong with it, in words; nothing for a sound kernel."""
        core = device.need_core()
        found = []
        if self.vgpr_spills or self.sgpr_spills:
            found.append(f"spills {self.vgpr_spills} vector and {self.sgpr_spills} scalar registers")
        if self.scratch_bytes:
            found.append(f"{self.scratch_bytes} bytes of scratch a lane")
        if self.lds_bytes > core.lds_bytes:
            found.append(f"{self.lds_bytes:,} bytes of LDS, of {core.lds_bytes:,}")
        return found

    def waves_per_simd(self, device: Device) -> int:
        """Waves that a vector unit can keep in flight, by registers and by local memory."""
        core = device.need_core()
        granule = core.register_granule
        registers = max(-(-self.vgprs // granule) * granule, granule)
        by_registers = min(core.max_waves, core.registers // registers)
        if not self.lds_bytes or not self.threads:
            return by_registers
        waves = -(-self.threads // core.wave_size)
        by_lds = core.lds_bytes // self.lds_bytes * waves / core.simds
        return min(by_registers, max(int(by_lds), 1 if self.lds_bytes <= core.lds_bytes else 0))


@dataclasses.dataclass(frozen=True)
class LaunchSize:
    """How a kernel is started: workgroups, threads of each, and local memory asked for."""

    grid: int
    threads: int
    lds_bytes: int


def read_kernels(code_folder: pathlib.Path, dump_folder: pathlib.Path) -> list[Kernel]:
    """All kernels of one compilation, by name.

    Args:
      code_folder: where XLA:ROCm kept its code objects (`*.hsaco`) and their LLVM code (`*_opt.ll`).
      dump_folder: its dump of the same compilation.
    """
    launches = _launches(dump_folder)
    matrix_calls = _matrix_calls(code_folder)
    kernels = {}
    for path in sorted(code_folder.glob("*.hsaco")):
        code = path.read_bytes()
        for notes in _kernel_notes(code):
            name = notes[".name"]
            loop = main_loop(kernel_code(code, name))
            kernels[name] = _kernel(notes, launches.get(name, LaunchSize(0, 0, 0)), matrix_calls, loop)
    return [kernels[name] for name in sorted(kernels)]


def _kernel(
    notes: Mapping[str, Any], launch: LaunchSize, matrix_calls: Mapping[str, int], loop: Loop | None
) -> Kernel:
    return Kernel(
        name=notes[".name"],
        vgprs=notes[".vgpr_count"],
        sgprs=notes[".sgpr_count"],
        vgpr_spills=notes[".vgpr_spill_count"],
        sgpr_spills=notes[".sgpr_spill_count"],
        scratch_bytes=notes[".private_segment_fixed_size"],
        lds_bytes=notes[".group_segment_fixed_size"] + launch.lds_bytes,
        threads=launch.threads,
        grid=launch.grid,
        matrix_instructions=matrix_calls.get(notes[".name"], 0),
        loop=loop,
    )


def _kernel_notes(code: bytes) -> Iterator[Mapping[str, Any]]:
    """What a code object's notes say of each kernel in it."""
    at = code.find(NOTE_OWNER)
    while at >= 0:
        _, size, kind = struct.unpack("<III", code[at - 12 : at])
        start = at + len(NOTE_OWNER)
        if kind == METADATA_NOTE:
            yield from msgpack.unpackb(code[start : start + size], strict_map_key=False)["amdhsa.kernels"]
        at = code.find(NOTE_OWNER, start)


def _launches(dump_folder: pathlib.Path) -> dict[str, LaunchSize]:
    """By kernel; of several launches the one with the most local memory."""
    launches: dict[str, LaunchSize] = {}
    for path in sorted(dump_folder.glob("*thunk_sequence.txt")):
        for name, grid, threads, lds in LAUNCH.findall(path.read_text()):
            launch = LaunchSize(_num_in_grid(grid), _num_in_grid(threads), int(lds))
            if name not in launches or launches[name].lds_bytes < launch.lds_bytes:
                launches[name] = launch
    return launches


def _num_in_grid(numbers: str) -> int:
    product = 1
    for number in numbers.split(","):
        product *= int(number)
    return product


def _matrix_calls(code_folder: pathlib.Path) -> dict[str, int]:
    """Calls of matrix instructions in the optimised code of each kernel; XLA makes a file a kernel."""
    counts = {}
    for path in sorted(code_folder.glob("*_opt.ll")):
        text = path.read_text(errors="replace")
        for name in KERNEL_DEFINITION.findall(text):
            counts[name] = len(MATRIX_CALL.findall(text))
    return counts
