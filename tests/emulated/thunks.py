"""What a compiled program runs, in its order: parser of XLA's dump of its thunks.

A thunk is a step of XLA's runtime: the launch of a kernel, a copy, a loop. The dump has the list of thunks,
with the thunks of loops and branches indented, and their metadata: which instruction each belongs to.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence

from pallas_kernels.emulator import KernelLaunch
from zaya_jax.plan.rocm.code_objects import LAUNCH

THUNK = re.compile(r"^( *)(\d+): (k\w+)\s")
LABEL = re.compile(r"^ *(\w+):\s*$")
METADATA = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thunk:
    """A step of a compiled program.

    Attributes:
      kind: XLA's name, such as "kCopy".
      instruction: instruction of the program that it computes, or a part of.
      kernel: name of the launched kernel; empty for other kinds.
      launch: sizes of the launch; None for other kinds.
      parts: thunks of a loop's "condition" and "body", or of branches, by XLA's name.
    """

    kind: str
    instruction: str
    kernel: str = ""
    launch: KernelLaunch | None = None
    parts: Mapping[str, Sequence["Thunk"]] = dataclasses.field(default_factory=dict)


def parse_thunks(sequence: str, metadata: str) -> list[Thunk]:
    """Parses the thunks of a program.

    Args:
      sequence: text of the file `*.thunk_sequence.txt`.
      metadata: text of the file `*.thunk_metadata.txt`.
    """
    instructions = {int(number): name for name, number in METADATA.findall(metadata)}
    lines = [line for line in sequence.splitlines() if line.strip()]
    thunks, _ = _parse_list(lines, 0, instructions)
    return thunks


def _parse_list(lines: Sequence[str], at: int, instructions: Mapping[int, str]) -> tuple[list[Thunk], int]:
    """Parses thunks of one indentation; returns also the line after them."""
    thunks: list[Thunk] = []
    indentation = None
    while at < len(lines):
        matched = THUNK.match(lines[at])
        # A label belongs to the thunk before it, which has consumed it.
        if not matched or (indentation is not None and len(matched[1]) < indentation):
            break
        indentation = len(matched[1])
        line = lines[at]
        at += 1
        parts: dict[str, list[Thunk]] = {}
        # Labels are less indented than the thunk they follow is: only the kind tells whose they are.
        while matched[3] in ("kWhile", "kConditional") and at < len(lines):
            label = LABEL.match(lines[at])
            if not label or label[1] in parts:
                break
            parts[label[1]], at = _parse_list(lines, at + 1, instructions)
        thunks.append(_thunk(matched[3], instructions[int(matched[2])], line, parts))
    return thunks, at


def _thunk(kind: str, instruction: str, line: str, parts: Mapping[str, Sequence[Thunk]]) -> Thunk:
    launched = LAUNCH.search(line)
    # Only launches of kernels have sizes.
    if not launched:
        return Thunk(kind=kind, instruction=instruction, parts=parts)
    kernel, grid, threads, lds_bytes = launched.groups()
    across, down, deep = (int(number) for number in grid.split(","))
    # Triton and XLA's own kernels have one axis of threads; the emulator counts them along all.
    num_threads = 1
    for number in threads.split(","):
        num_threads *= int(number)
    launch = KernelLaunch(grid=(across, down, deep), threads=num_threads, lds_bytes=int(lds_bytes))
    return Thunk(kind=kind, instruction=instruction, kernel=kernel, launch=launch)
