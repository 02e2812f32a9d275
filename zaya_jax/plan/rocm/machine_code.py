"""Work of a wave in the main loop of a kernel, decoded from gfx942 machine code.

It decodes only what distinguishes instructions: their lengths, the unit that executes them, and branch
targets ([LLVM-AMDGPU]).
"""

import collections
import dataclasses
import struct
from collections.abc import Iterator

MATRIX_CYCLES = {0x3E: 32, 0x3F: 16, 0x44: 64, 0x45: 32, 0x4C: 32, 0x4D: 16, 0x60: 32, 0x61: 16}
"""Cycles of a matrix instruction by its opcode: 32x32x4 and 16x16x8 of xf32, 32x32x2 and 16x16x4 of float32,
32x32x8 and 16x16x16 of float16 and of bfloat16. Multiplications per cycle: 128 in xf32, 32 in float32, 256 in
float16 and bfloat16."""
VECTOR_CYCLES = 4
"""Cycles of other vector instructions: 64 lanes on 16 units."""
TRANSCENDENTAL_CYCLES = 16
"""Cycles of exponentials, logarithms, reciprocals and roots."""
# Opcodes of SOPP: s_barrier, and the branches from s_branch to s_cbranch_execnz ([LLVM-AMDGPU]).
_BARRIER, _BRANCHES = 10, range(2, 10)
# v_accvgpr_read and v_accvgpr_write, which are encoded among the matrix instructions but move single
# registers.
_ACCUMULATOR_MOVES = (0x58, 0x59)
_TRANSCENDENTALS = frozenset((*range(0x20, 0x28), 0x29, 0x2A, *range(0x3D, 0x42)))
"""Opcodes of VOP1."""
_LITERALS = (255, 249, 250)
"""First operands that add a second word: a literal, and the sub-word and lane forms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """One iteration of a loop by one wave.

    Attributes:
      instructions: number of all instructions.
      matrix: number of matrix instructions.
      matrix_cycles: cycles of matrix instructions.
      vector: number of other vector instructions, including moves between the two kinds of registers.
      vector_cycles: cycles of other vector instructions.
      local: number of accesses to local memory.
      memory: number of accesses to memory.
      barriers: number of barriers between the waves of a workgroup.
    """

    instructions: int
    matrix: int
    matrix_cycles: int
    vector: int
    vector_cycles: int
    local: int
    memory: int
    barriers: int

    def matrix_share(self, waves: int) -> float:
        """Maximum utilization of the matrix unit, without stalls.

        Two or more waves can use the matrix and the vector unit at the same time; a single wave alternates
        between them.
        """
        both = max if waves > 1 else sum
        return self.matrix_cycles / max(both((self.matrix_cycles, self.vector_cycles)), 1)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    kind: str
    cycles: int = 0
    target: int | None = None
    """Target of a branch, as an offset in bytes."""


def main_loop(code: bytes) -> Loop | None:
    """Returns the innermost loop with the most matrix instructions; without any, the one with the most
    instructions.

    Among loops with equally many matrix instructions it is the shortest: the others mask operands at the
    edges.

    Args:
      code: machine code of one kernel.
    """
    decoded = list(_decode(code))
    at = {offset: number for number, (offset, _) in enumerate(decoded)}
    # A branch to an earlier instruction closes a loop.
    spans = [
        (at[each.target], number)
        for number, (_, each) in enumerate(decoded)
        # A target that is not the start of an instruction, as in data that is decoded, closes no loop.
        if each.target is not None and at.get(each.target, number + 1) <= number
    ]
    # A loop is innermost if no other loop is inside it.
    inner = [(a, b) for a, b in spans if not any((c, d) != (a, b) and a <= c and d <= b for c, d in spans)]
    loops = [_loop([each for _, each in decoded[start : end + 1]]) for start, end in inner]
    return max(loops, key=_weight, default=None)


def _weight(loop: Loop) -> tuple[int, int]:
    return loop.matrix, -loop.instructions if loop.matrix else loop.instructions


def _loop(body: list[_Instruction]) -> Loop:
    counts = collections.Counter(each.kind for each in body)
    cycles: collections.Counter[str] = collections.Counter()
    for each in body:
        cycles[each.kind] += each.cycles
    return Loop(
        instructions=len(body),
        matrix=counts["matrix"],
        matrix_cycles=cycles["matrix"],
        vector=counts["vector"],
        vector_cycles=cycles["vector"],
        local=counts["local"],
        memory=counts["memory"],
        barriers=counts["barrier"],
    )


def _decode(code: bytes) -> Iterator[tuple[int, _Instruction]]:
    """Yields instructions with their offsets."""
    offset = 0
    while offset + 4 <= len(code):
        (word,) = struct.unpack_from("<I", code, offset)
        size, instruction = _one(word, offset)
        yield offset, instruction
        offset += size


def _one(word: int, offset: int) -> tuple[int, _Instruction]:
    """Returns the size of an instruction in bytes, from its first word, and the instruction."""
    if word >> 23 == 0b101111111:  # SOPP
        return 4, _program(word >> 16 & 0x7F, word & 0xFFFF, offset)
    # VOP1, VOP2 and VOPC have a zero as their highest bit.
    if word >> 31 == 0:
        return _vector(word)
    # SOP1, SOP2, SOPC and SOPK. SOPP has the same two bits and must therefore be tested before.
    if word >> 30 == 0b10:
        return _scalar(word), _Instruction("scalar")
    top = word >> 26
    if top == 0b110100:  # VOP3 and VOP3P
        return 8, _wide(word)
    kind = {0b110110: "local", 0b110111: "memory", 0b111000: "memory", 0b111010: "memory", 0b111100: "memory"}
    # Of the remaining formats only VINTRP has a single word.
    return 4 if top == 0b110101 else 8, _Instruction(kind.get(top, "scalar"))


def _program(opcode: int, immediate: int, offset: int) -> _Instruction:
    if opcode == _BARRIER:
        return _Instruction("barrier")
    if opcode in _BRANCHES and opcode != 3:  # s_wakeup
        # Branch offsets are signed 16-bit counts of words after the instruction.
        words = immediate - 0x10000 if immediate & 0x8000 else immediate
        return _Instruction("scalar", target=offset + 4 + 4 * words)
    return _Instruction("scalar")


def _scalar(word: int) -> int:
    """Size in bytes of SOP1, SOP2, SOPC and SOPK instructions."""
    if word >> 23 == 0b101111101:  # SOP1
        operands = (word & 0xFF,)
    elif word >> 28 == 0b1011 and word >> 23 != 0b101111110:  # SOPK: s_setreg_imm32_b32 has a literal
        return 8 if word >> 23 & 0x1F == 20 else 4
    else:
        operands = (word & 0xFF, word >> 8 & 0xFF)
    # An operand of 255 stands for a literal, which is the next word.
    return 8 if 255 in operands else 4


def _vector(word: int) -> tuple[int, _Instruction]:
    """Decodes VOP1, VOP2 and VOPC instructions."""
    kind, first = word >> 25, word & 0x1FF
    has_more = first in _LITERALS
    # VOP1, which has its opcode in the bits from 9 to 16.
    if kind == 0b0111111 and word >> 9 & 0xFF in _TRANSCENDENTALS:
        return 8 if has_more else 4, _Instruction("vector", TRANSCENDENTAL_CYCLES)
    if kind < 0b0111110 and kind in (23, 24, 36, 37):  # multiply-add with a constant
        has_more = True
    return 8 if has_more else 4, _Instruction("vector", VECTOR_CYCLES)


def _wide(word: int) -> _Instruction:
    if word >> 23 == 0b110100111:  # VOP3P
        opcode = word >> 16 & 0x7F
        # Matrix instructions for other types are counted as well, without cycles.
        if opcode in MATRIX_CYCLES or (opcode >= 0x40 and opcode not in _ACCUMULATOR_MOVES):
            return _Instruction("matrix", MATRIX_CYCLES.get(opcode, 0))
        return _Instruction("vector", VECTOR_CYCLES)
    # In the long format the opcodes of VOP1 instructions start at 0x140.
    is_slow = (word >> 16 & 0x3FF) - 0x140 in _TRANSCENDENTALS
    return _Instruction("vector", TRANSCENDENTAL_CYCLES if is_slow else VECTOR_CYCLES)
