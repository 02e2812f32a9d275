"""Decoded instructions: operands, modifiers and the address where they stand."""

import dataclasses
from typing import Any

VCC = 106
"""First of the two scalar registers of the vector condition code."""
M0 = 124
EXEC = 126
"""First of the two scalar registers of the mask of active lanes."""
SCALAR_REGISTERS = 128
ACCUMULATOR = 256
"""Number of the first accumulation register among vector registers."""


@dataclasses.dataclass(frozen=True)
class Operand:
    """A register or a constant that an instruction names.

    Attributes:
      kind: "vector", "scalar" or "constant".
      register: number of the first register; accumulators follow the other vector registers.
      count: number of 32-bit registers.
      value: bits of a constant, as wide as the operand.
      negate: whether the sign bit is flipped before use.
      absolute: whether the sign bit is cleared before use, and before it is flipped.
    """

    kind: str
    register: int = 0
    count: int = 1
    value: int = 0
    negate: bool = False
    absolute: bool = False


@dataclasses.dataclass(frozen=True)
class GpuInstruction:
    """A decoded instruction.

    Attributes:
      pc: address in the code object.
      size: bytes of its encoding.
      name: lower-case mnemonic without the suffix of its encoding.
      encoding: format of the encoding, such as "VOP2".
      destinations: registers that are written.
      sources: registers and constants that are read, in the order of the instruction's formula.
      fields: modifiers by name, as encoded: "offset", "dpp", "src0_sel", "opsel", "clmp" and others.
      words: the encoding as 32-bit words.
      text: how messages print it.
    """

    pc: int
    size: int
    name: str
    encoding: str
    destinations: tuple[Operand, ...]
    sources: tuple[Operand, ...]
    fields: dict[str, Any]
    words: tuple[int, ...]
    text: str

    @property
    def branch_target(self) -> int | None:
        """Address to which a branch leads; None for other instructions."""
        # Distances count words from the next instruction, which is four bytes further on.
        if not self.name.startswith(("s_branch", "s_cbranch")):
            return None
        return self.pc + 4 + 4 * signed16(self.fields["simm16"])

    @property
    def ends_block(self) -> bool:
        """Whether waves may part or stop here."""
        return self.name in ("s_barrier", "s_endpgm") or self.branch_target is not None


def signed16(value: int) -> int:
    """Returns the signed number whose lowest 16 bits are given."""
    return (value & 0xFFFF ^ 0x8000) - 0x8000
