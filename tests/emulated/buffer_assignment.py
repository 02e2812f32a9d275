"""Where a compiled program stores each value: parser of XLA's dump of its buffer assignment.

One file of the dump lists the memory allocations, and the values in each with their place. Another lists for
each value all positions that denote it: results of tuples, bitcasts and loops share one value.
"""

import dataclasses
import re
from collections.abc import Mapping

ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*):$")
PLACE = re.compile(r"^ value: <(\d+) (.*) @\d+> \(size=(\d+),offset=(\d+)\)")
PARAMETER = re.compile(r"\bparameter (\d+), shape \|[^|]*\| at ShapeIndex \{\}")
VALUE = re.compile(r"^<(\d+) .* @\d+>$")
POSITION = re.compile(r"^  (\S+)(?: \{([\d,]*)\})?$")
Position = tuple[str, str | None]
"""Name of an instruction, and the index in its result such as "3"; None for a result that is no tuple."""


@dataclasses.dataclass(frozen=True)
class BufferSlice:
    """Place of a value: number of its allocation, and bytes in it."""

    allocation: int
    offset: int
    size: int

    def overlaps(self, other: "BufferSlice") -> bool:
        """Whether both have a byte in common."""
        return (
            self.allocation == other.allocation
            and self.offset < other.offset + other.size
            and other.offset < self.offset + self.size
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BufferAssignment:
    """Memory of a program.

    Attributes:
      sizes: bytes of each allocation.
      parameters: allocation of each parameter of the program, by its number.
      constants: instruction whose value each allocation of a constant contains.
      slices: place of each value of the program, by its positions.
    """

    sizes: Mapping[int, int]
    parameters: Mapping[int, int]
    constants: Mapping[int, str]
    slices: Mapping[Position, BufferSlice]

    def results(self, instruction: str) -> list[BufferSlice]:
        """Places of an instruction's results, in the order of its tuple."""
        if (instruction, None) in self.slices:
            return [self.slices[instruction, None]]
        places = []
        while (instruction, str(len(places))) in self.slices:
            places.append(self.slices[instruction, str(len(places))])
        return places


def parse_buffer_assignment(assignment: str, values: str) -> BufferAssignment:
    """Parses a buffer assignment.

    Args:
      assignment: text of the file `*-buffer-assignment.txt`.
      values: text of the file `*-buffer-assignment-values.txt`.
    """
    sizes, parameters, constants, places = {}, {}, {}, {}
    allocation, is_constant = -1, False
    # Each allocation is followed by the values that it contains at some time.
    for line in assignment.splitlines():
        if matched := ALLOCATION.match(line):
            allocation = int(matched[1])
            sizes[allocation] = int(matched[2])
            is_constant = matched[3].endswith(", constant")
            if parameter := PARAMETER.search(matched[3]):
                parameters[int(parameter[1])] = allocation
        elif matched := PLACE.match(line):
            places[int(matched[1])] = BufferSlice(allocation, int(matched[4]), int(matched[3]))
            # The program initializes these before its first thunk.
            if is_constant:
                constants[allocation] = matched[2]
    return BufferAssignment(
        sizes=sizes, parameters=parameters, constants=constants, slices=_positions(values, places)
    )


def _positions(values: str, places: Mapping[int, BufferSlice]) -> dict[Position, BufferSlice]:
    slices: dict[Position, BufferSlice] = {}
    place, in_positions = None, False
    for line in values.splitlines():
        if matched := VALUE.match(line):
            # Values inside of fusions have no place.
            place = places.get(int(matched[1]))
        elif line.startswith(" ") and not line.startswith("  "):
            # Uses are indented in the same way as positions.
            in_positions = line == " positions:"
        elif place is not None and in_positions and (matched := POSITION.match(line)):
            slices[matched[1], matched[2]] = place
    return slices
