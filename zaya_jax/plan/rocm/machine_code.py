"""What a wave does in the main loop of a kernel, read from gfx942 machine code.

Only as much of it is decoded as tells instructions from each other: their lengths, what unit they are for,
and where branches lead ([LLVM-AMDGPU]).
"""

import collections
import dataclasses
import struct
from collections.abc import Iterator

MATRIX_CYCLES = {0x44: 64, 0x45: 32, 0x4C: 32, 0x4D: 16, 0x60: 32, 0x61: 16}
"""Cycles of a matrix instruction by its opcode: 32x32x2 and 16x16x4 of float32, 32x32x8 and 16x16x16 of
float16 and of bfloat16. A unit does 64 operations a cycle in float32, and 512 in the others."""
VECTOR_CYCLES = 4
"""Of any other vector instruction: 64 lanes on 16."""
TRANSCENDENTAL_CYCLES = 16
"""Of exponentials, logarithms, reciprocals and roots."""
_BARRIER, _BRANCHES = 10, range(2, 10)
_ACCUMULATOR_MOVES = (0x58, 0x59)
_TRANSCENDENTALS = frozenset((*range(0x20, 0x28), 0x29, 0x2A, *range(0x3D, 0x42)))
"""Opcodes of VOP1."""
_LITERALS = (255, 249, 250)
"""First operands that a second word belongs to: a literal, and the sub-word and lane forms."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop as one wave goes through it once.

    Attributes:
      instructions: all of them.
      matrix: of the matrix units.
      matrix_cycles: that those take.
      vector: other vector instructions, moves between the two kinds of registers included.
      vector_cycles: that those take.
      local: reads and writes of local memory.
      memory: reads and writes of memory.
      barriers: at which the waves of a workgroup wait for each other.
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
        """Of the time of a vector unit's waves the part in which its matrix unit works, at most.

        Two waves or more can use both units at once, one can not. Waiting is not in it.
        """
        both = max if waves > 1 else sum
        return self.matrix_cycles / max(both((self.matrix_cycles, self.vector_cycles)), 1)


@dataclasses.dataclass(frozen=True)
class _Instruction:
    kind: str
    cycles: int = 0
    target: int | None = None
    """Of a branch, in bytes."""


def main_loop(code: bytes) -> Loop | None:
    """The innermost loop with most matrix instructions, or, where none has any, most instructions.

    Of loops with as many matrix instructions the shortest: the others mask what they multiply, at the edges.

    Args:
      code: of one kernel.
    """
    decoded = list(_decode(code))
    at = {offset: number for number, (offset, _) in enumerate(decoded)}
    spans = [
        (at[each.target], number)
        for number, (_, each) in enumerate(decoded)
        if each.target is not None and at.get(each.target, number + 1) <= number
    ]
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
    """Instructions with their offsets."""
    offset = 0
    while offset + 4 <= len(code):
        (word,) = struct.unpack_from("<I", code, offset)
        size, instruction = _one(word, offset)
        yield offset, instruction
        offset += size


def _one(word: int, offset: int) -> tuple[int, _Instruction]:
    """Bytes of an instruction by its first word, and what it is."""
    if word >> 23 == 0b101111111:  # SOPP
        return 4, _program(word >> 16 & 0x7F, word & 0xFFFF, offset)
    if word >> 31 == 0:
        return _vector(word)
    if word >> 30 == 0b10:
        return _scalar(word), _Instruction("scalar")
    top = word >> 26
    if top == 0b110100:  # VOP3 and VOP3P
        return 8, _wide(word)
    kind = {0b110110: "local", 0b110111: "memory", 0b111000: "memory", 0b111010: "memory", 0b111100: "memory"}
    return 4 if top == 0b110101 else 8, _Instruction(kind.get(top, "scalar"))


def _program(opcode: int, immediate: int, offset: int) -> _Instruction:
    if opcode == _BARRIER:
        return _Instruction("barrier")
    if opcode in _BRANCHES and opcode != 3:  # s_wakeup
        words = immediate - 0x10000 if immediate & 0x8000 else immediate
        return _Instruction("scalar", target=offset + 4 + 4 * words)
    return _Instruction("scalar")


def _scalar(word: int) -> int:
    """Bytes of SOP1, SOP2, SOPC and SOPK."""
    if word >> 23 == 0b101111101:  # SOP1
        operands = (word & 0xFF,)
    elif word >> 28 == 0b1011 and word >> 23 != 0b101111110:  # SOPK: s_setreg_imm32_b32 has a literal
        return 8 if word >> 23 & 0x1F == 20 else 4
    else:
        operands = (word & 0xFF, word >> 8 & 0xFF)
    return 8 if 255 in operands else 4


def _vector(word: int) -> tuple[int, _Instruction]:
    """VOP1, VOP2 and VOPC."""
    kind, first = word >> 25, word & 0x1FF
    has_more = first in _LITERALS
    if kind == 0b0111111 and word >> 9 & 0xFF in _TRANSCENDENTALS:
        return 8 if has_more else 4, _Instruction("vector", TRANSCENDENTAL_CYCLES)
    if kind < 0b0111110 and kind in (23, 24, 36, 37):  # a multiply and an add of a constant
        has_more = True
    return 8 if has_more else 4, _Instruction("vector", VECTOR_CYCLES)


def _wide(word: int) -> _Instruction:
    if word >> 23 == 0b110100111:  # VOP3P
        opcode = word >> 16 & 0x7F
        if opcode >= 0x40 and opcode not in _ACCUMULATOR_MOVES:
            return _Instruction("matrix", MATRIX_CYCLES.get(opcode, 0))
        return _Instruction("vector", VECTOR_CYCLES)
    is_slow = (word >> 16 & 0x3FF) - 0x140 in _TRANSCENDENTALS
    return _Instruction("vector", TRANSCENDENTAL_CYCLES if is_slow else VECTOR_CYCLES)


def kernel_code(code_object: bytes, name: str) -> bytes:
    """Machine code of one kernel of an ELF file; empty where it is not in it."""
    sections = _sections(code_object)
    for kind, _, offset, size, link in sections:
        if kind not in (2, 11):  # symbols, and those for the loader
            continue
        names = sections[link][2]
        for at in range(offset, offset + size, 24):
            string, _, _, _, value, length = struct.unpack_from("<IBBHQQ", code_object, at)
            if length and _string(code_object, names + string) == name:
                start = _file_offset(sections, value)
                return code_object[start : start + length]
    return b""


def _sections(elf: bytes) -> list[tuple[int, int, int, int, int]]:
    """Of each section its kind, address, offset, size and link."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    found = []
    for at in range(start, start + size * count, size):
        _, kind, _, address, offset, length, link = struct.unpack_from("<IIQQQQI", elf, at)
        found.append((kind, address, offset, length, link))
    return found


def _file_offset(sections: list[tuple[int, int, int, int, int]], address: int) -> int:
    inside = (s for s in sections if s[1] and s[1] <= address < s[1] + s[3])
    _, base, offset, _, _ = next(inside)
    return offset + address - base


def _string(elf: bytes, at: int) -> str:
    return elf[at : elf.index(b"\0", at)].decode(errors="replace")
