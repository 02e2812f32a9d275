"""Encodes matrix instructions, which tinygrad's constructors know only in part."""

from tinygrad.renderer.amd.dsl import v
from tinygrad.runtime.autogen.amd.cdna import enum, ins

WITHOUT_CONSTRUCTOR = ("XF32",)


class MatrixCode:
    """Machine code of a matrix instruction.

    Args:
      name: mnemonic in capitals.
      registers: first registers of the result, the two factors and the addend.
      counts: numbers of registers of the result and of a factor.
    """

    def __init__(self, name: str, registers: tuple[int, int, int, int], counts: tuple[int, int]):
        opcode = enum.VOP3POp[name]
        known = opcode
        if name.endswith(WITHOUT_CONSTRUCTOR):  # CDNA4's tables have none of these
            known = enum.VOP3POp[f"V_MFMA_F32_{'32X32X8' if '32X32' in name else '16X16X16'}_BF16"]
        result, first, second, addend = registers
        fields = {"vdst": (result, counts[0]), "src2": (addend, counts[0])}
        fields |= {"src0": (first, counts[1]), "src1": (second, counts[1])}
        operands = {key: _vectors(number, count) for key, (number, count) in fields.items()}
        raw = int.from_bytes(ins.VOP3P_MFMA(known, **operands).to_bytes(), "little")
        self._code = (raw & ~(0x7F << 16) | opcode.value << 16).to_bytes(8, "little")

    def to_bytes(self) -> bytes:
        """Returns the eight bytes."""
        return self._code


def _vectors(number: int, count: int):
    return v[number] if count == 1 else v[number : number + count - 1]
