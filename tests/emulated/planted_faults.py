"""Faults planted in machine code: an instruction of a kernel is replaced by a wrong one of the same size."""

import dataclasses
import random
import struct
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from pallas_kernels.emulator import Buffer, EmulationError, Emulator, KernelCode, KernelLaunch, execute
from pallas_kernels.emulator.decode import decode
from pallas_kernels.emulator.instruction import GpuInstruction

S_NOP = 0xBF800000
S_MOV_B64 = 0b101111101 << 23 | 1 << 8
EXEC_CODE = 126
SHIFT = 4
"""Bytes by which an address is shifted; the device offset of most accesses has room for it."""


@dataclasses.dataclass(frozen=True)
class CapturedLaunch:
    """A launch that can be executed again.

    Attributes:
      name: name of the kernel in `backend.launch`.
      kernel: its code.
      launch: its sizes.
      buffers: its arguments as they were before the launch.
      outputs: results of the unchanged kernel.
      executed: addresses of the instructions that it executes.
    """

    name: str
    kernel: KernelCode
    launch: KernelLaunch
    buffers: tuple[Buffer, ...]
    outputs: tuple[np.ndarray, ...]
    executed: frozenset[int]


@dataclasses.dataclass(frozen=True)
class Fault:
    """A planted fault.

    Attributes:
      kind: what is wrong, one of `KINDS`.
      instruction: the instruction that is replaced.
      word: first word of its replacement.
    """

    kind: str
    instruction: GpuInstruction
    word: int

    def plant(self, kernel: KernelCode) -> KernelCode:
        """Returns the kernel with the fault."""
        at = self.instruction.pc - kernel.address
        code = kernel.code[:at] + struct.pack("<I", self.word) + kernel.code[at + 4 :]
        return dataclasses.replace(kernel, code=code)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What noticed a fault.

    Attributes:
      noticed: name of the check; "values" for outputs that differ; None if nothing did.
      detail: message of the check.
    """

    noticed: str | None
    detail: str = ""


def _removed(instruction: GpuInstruction) -> int:
    return S_NOP


def _mask_ignored(instruction: GpuInstruction) -> int:
    """s_and_saveexec_b64 becomes s_mov_b64 from EXEC: the old mask is saved and stays."""
    return S_MOV_B64 | instruction.destinations[0].register << 16 | EXEC_CODE


def _offset_shifted(instruction: GpuInstruction) -> int:
    # The offset is in the lowest bits of all formats of memory, in bytes or in elements.
    return instruction.words[0] + SHIFT


KINDS: dict[str, tuple[Callable[[GpuInstruction], bool], Callable[[GpuInstruction], int]]] = {
    "wait removed": (lambda i: i.name == "s_waitcnt", _removed),
    "barrier removed": (lambda i: i.name == "s_barrier", _removed),
    "mask ignored": (lambda i: i.name == "s_and_saveexec_b64", _mask_ignored),
    "device address shifted": (lambda i: i.encoding in ("GLOBAL", "MUBUF"), _offset_shifted),
    "local address shifted": (lambda i: i.name.startswith(("ds_read", "ds_write")), _offset_shifted),
}


def faults_of(launch: CapturedLaunch, kind: str) -> Iterator[Fault]:
    """All faults of a kind in instructions that a launch executes.

    Args:
      launch: the launch.
      kind: one of `KINDS`.
    """
    applies, replace = KINDS[kind]
    for instruction in decode(launch.kernel):
        if instruction.pc in launch.executed and applies(instruction):
            yield Fault(kind, instruction, replace(instruction))


def choose(launches: list[CapturedLaunch], per_kind: int, seed: int) -> list[tuple[CapturedLaunch, Fault]]:
    """Chooses faults at random: as many of each kind, spread over the launches."""
    chosen = []
    generator = random.Random(seed)
    for kind in KINDS:
        places = {launch.name: list(faults_of(launch, kind)) for launch in launches}
        order = [launch for launch in launches if places[launch.name]]
        generator.shuffle(order)
        for number in range(per_kind):
            launch = order[number % len(order)]
            faults = places[launch.name]
            chosen.append((launch, faults.pop(generator.randrange(len(faults)))))
            if not faults:
                order.remove(launch)
    return chosen


def judge(launch: CapturedLaunch, fault: Fault) -> Verdict:
    """Executes a launch with a fault and returns what notices it."""
    try:
        execution = execute(fault.plant(launch.kernel), launch.launch, launch.buffers)
    except EmulationError as error:
        return Verdict(error.check, str(error))
    if any(execution.unwritten):
        return Verdict("unwritten", f"{sum(execution.unwritten)} bytes")
    pairs = zip(execution.outputs, launch.outputs, strict=True)
    if any(got.tobytes() != want.tobytes() for got, want in pairs):
        return Verdict("values")
    return Verdict(None)


def capture(name: str, kernel: KernelCode, launch: KernelLaunch, buffers: Sequence[Buffer]) -> CapturedLaunch:
    """Executes a launch and keeps what is needed to execute it again."""
    emulator = Emulator(kernel, launch, buffers)
    outputs = tuple(emulator.run().outputs)
    executed = frozenset(emulator.executed_addresses())
    return CapturedLaunch(name, kernel, launch, tuple(buffers), outputs, executed)
