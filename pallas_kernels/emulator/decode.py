"""Decodes gfx942 instructions with the tables of tinygrad, which were made from AMD's machine-readable ISA.

The tables are pure Python in a package that installs everywhere, unlike LLVM's disassembler; in size and
mnemonic they agree with llvm-objdump 19 on all instructions of this project's kernels. Only this module
depends on them.
"""

import functools
import re
import struct
from collections.abc import Iterator
from typing import Any

from pallas_kernels.emulator.code_object import KernelCode
from pallas_kernels.emulator.errors import EmulationError
from pallas_kernels.emulator.instruction import ACCUMULATOR, VCC, GpuInstruction, Operand, signed16

LONGEST = 16
"""Bytes of the longest instruction."""
INLINE_FLOATS = {240: 0.5, 241: -0.5, 242: 1.0, 243: -1.0, 244: 2.0, 245: -2.0, 246: 4.0, 247: -4.0}
INVERSE_2PI = 0x3E22F983
LITERAL = 255
NO_SCALAR_ADDRESS = 127
"""Scalar address of a global access whose vector address has 64 bits."""
CARRY_IN = {"v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32"}
READS_VCC = CARRY_IN | {"v_cndmask_b32", "v_div_fmas_f32"}
WRITES_VCC = CARRY_IN | {"v_add_co_u32", "v_sub_co_u32", "v_subrev_co_u32"}
WRITES_SCALAR = {"v_readfirstlane_b32", "v_readlane_b32"}
ACCUMULATOR_MOVES = {
    "V_ACCVGPR_READ": ("src0",),
    "V_ACCVGPR_WRITE": ("vdst",),
    "V_ACCVGPR_MOV": ("vdst", "src0"),
}
"""Operands that are accumulators, by the start of the mnemonic."""
ACCUMULATES = {"v_fmac_f32", "v_fmac_f64", "v_pk_fmac_f16", "v_dot2c_f32_f16"}
"""Instructions whose destination is also their last source."""
SCALAR_FORMATS = {"SOP1", "SOP2", "SOPC", "SOPK", "SOPP", "SMEM"}
MEMORY_FORMATS = {"GLOBAL", "FLAT", "SCRATCH", "MUBUF", "DS"}

XF32_TWINS = {"v_mfma_f32_32x32x4_xf32": 0x60, "v_mfma_f32_16x16x8_xf32": 0x61}
"""Opcodes of the bf16 instructions with the same registers: the decoder's tables of CDNA4 lack xf32."""
MATRIX_OPCODE = 0x7F << 16

VCC_OPERAND = Operand("scalar", VCC, 2)


@functools.lru_cache(maxsize=64)
def decode(kernel: KernelCode) -> tuple[GpuInstruction, ...]:
    """Decodes all instructions of a kernel.

    Raises:
      EmulationError: if the decoder does not know an encoding.
      ImportError: if tinygrad is not installed.
    """
    return tuple(_instructions(kernel))


def _instructions(kernel: KernelCode) -> Iterator[GpuInstruction]:
    # Instructions have 4, 8, 12 or 16 bytes: only decoding one tells where the next starts.
    at = 0
    while at < len(kernel.code):
        piece = kernel.code[at : at + LONGEST].ljust(LONGEST, b"\0")
        decoded = _decode_bytes(piece, kernel.address + at)
        yield _instruction(decoded, kernel.address + at)
        at += decoded.size()


def _decode_bytes(piece: bytes, pc: int) -> Any:
    # Late, so that everything else imports without the package.
    from tinygrad.renderer.amd import decode_inst

    try:
        return decode_inst(piece, "cdna")
    except ValueError as error:
        word = struct.unpack_from("<I", piece)[0]
        raise EmulationError("instruction", f"unknown encoding {word:#010x}", pc=pc) from error


def _instruction(decoded: Any, pc: int) -> GpuInstruction:
    name = re.sub(r"_e(32|64)$", "", decoded.op.name.lower())
    text, raw = repr(decoded), decoded.to_bytes()
    if name in XF32_TWINS:
        twin = int.from_bytes(raw, "little") & ~MATRIX_OPCODE | XF32_TWINS[name] << 16
        decoded = _decode_bytes(twin.to_bytes(LONGEST, "little"), pc)
    encoding = re.sub(r"_(LIT|DPP16|SDWA|SDWA_SDST|SDST|MFMA)$", "", type(decoded).__name__)
    fields = {
        key: getattr(decoded, key) for key, field in decoded._fields if type(field).__name__ == "BitField"
    }
    if encoding in SCALAR_FORMATS:
        destinations, sources = _scalar_operands(decoded, encoding, name, fields)
    elif encoding in MEMORY_FORMATS:
        destinations, sources = _memory_operands(decoded, encoding, name, fields)
    else:
        destinations, sources = _vector_operands(decoded, encoding, name, fields)
    return GpuInstruction(
        pc=pc,
        size=decoded.size(),
        name=name,
        encoding=encoding,
        destinations=tuple(destinations),
        sources=tuple(sources),
        fields=fields,
        words=struct.unpack(f"<{len(raw) // 4}I", raw),
        text=text,
    )


def _scalar_operands(
    decoded: Any, encoding: str, name: str, fields: dict[str, Any]
) -> tuple[list[Operand], list[Operand]]:
    # Branches and waits have their number in the field simm16.
    if encoding == "SOPP":
        return [], []
    if encoding == "SMEM":
        keys = ("sbase", "soffset") if fields.get("soffset_en") else ("sbase",)
        return [_operand(decoded, "sdata")], [_operand(decoded, key) for key in keys]
    if encoding == "SOPK":
        register = _operand(decoded, "sdst")
        immediate = fields["simm16"]
        # Comparisons of unsigned numbers extend it with zeros, all others with its sign.
        value = immediate if name.endswith("_u32") else signed16(immediate) & 0xFFFFFFFF
        constant = Operand("constant", value=value)
        # Comparisons write nothing but the condition code.
        if name.startswith("s_cmpk"):
            return [], [register, constant]
        reads_old = name in ("s_addk_i32", "s_mulk_i32")
        return [register], [register, constant] if reads_old else [constant]
    sources = [_operand(decoded, key) for key in ("ssrc0", "ssrc1") if hasattr(decoded, key)]
    return ([] if encoding == "SOPC" else [_operand(decoded, "sdst")]), sources


def _memory_operands(
    decoded: Any, encoding: str, name: str, fields: dict[str, Any]
) -> tuple[list[Operand], list[Operand]]:
    """Sources: address, data (of stores), scalar address or buffer resource, scalar offset."""
    keys = {
        "GLOBAL": ("vdst", "addr", ("data",), ("saddr",)),
        "FLAT": ("vdst", "addr", ("data",), ("saddr",)),
        "SCRATCH": ("vdst", "addr", ("data",), ("saddr",)),
        "MUBUF": ("vdata", "vaddr", ("vdata",), ("srsrc", "soffset")),
        "DS": ("vdst", "addr", ("data0", "data1"), ()),
    }[encoding]
    result, address, data, scalars = keys
    # The crossbar of local memory moves data between lanes: those instructions have a result and data.
    is_load = any(word in name for word in ("_load", "_read", "permute", "swizzle"))
    destinations = [_operand(decoded, result)] if is_load else []
    sources = [_operand(decoded, address)]
    if not is_load or "permute" in name:
        sources += [_operand(decoded, key) for key in data if key in decoded.op_regs]
    sources += [_operand(decoded, key) for key in scalars]
    return destinations, sources


def _vector_operands(
    decoded: Any, encoding: str, name: str, fields: dict[str, Any]
) -> tuple[list[Operand], list[Operand]]:
    known = {"src0", *decoded.op_regs}
    keys = [key for key in ("src0", "vsrc1", "src1", "src2") if key in known and hasattr(decoded, key)]
    sources = [
        _operand(decoded, "vsrc0" if key == "src0" and hasattr(decoded, "vsrc0") else key) for key in keys
    ]
    # SDWA names all sources as vector registers, and says in a bit which of them are scalar.
    sources = [
        Operand("scalar", operand.register) if fields.get(f"s{number}") else operand
        for number, operand in enumerate(sources)
    ]
    sources = [_with_sign(operand, number, fields) for number, operand in enumerate(sources)]
    # The literal is the factor of the one, and the addend of the other.
    if name in ("v_fmamk_f32", "v_fmaak_f32"):
        literal = Operand("constant", value=fields["literal"])
        sources.insert(1 if name == "v_fmamk_f32" else 2, literal)
    destinations = _vector_destinations(decoded, encoding, name, fields)
    if name in ACCUMULATES:
        sources.append(destinations[0])
    # Encodings of 32 bits name the condition code implicitly; others have a third source for it.
    if name in READS_VCC and (len(sources) < 3 or name == "v_div_fmas_f32"):
        sources.append(VCC_OPERAND)
    return destinations, sources


def _vector_destinations(decoded: Any, encoding: str, name: str, fields: dict[str, Any]) -> list[Operand]:
    if encoding == "VOPC":
        # Only the SDWA form can name another destination than the condition code.
        explicit = fields.get("sd")
        return [_operand(decoded, "sdst")] if explicit else [VCC_OPERAND]
    result = _operand(decoded, "vdst")
    if name in WRITES_SCALAR:
        # The field is the one of vector registers, but its number is a scalar register.
        number = result.register if result.kind == "scalar" else decoded.vdst.offset & 0xFF
        return [Operand("scalar", number)]
    if hasattr(decoded, "sdst"):
        return [result, _operand(decoded, "sdst")]
    return [result, VCC_OPERAND] if name in WRITES_VCC else [result]


def _with_sign(operand: Operand, number: int, fields: dict[str, Any]) -> Operand:
    """Applies the modifiers of a source's sign, which each encoding keeps in fields of its own."""
    if "opsel_hi" in fields or "cbsz" in fields:
        return operand  # packed and matrix instructions keep them for each half
    negate = fields.get("neg", 0) >> number & 1 or fields.get(f"src{number}_neg", 0)
    absolute = fields.get("abs", 0) >> number & 1 or fields.get(f"src{number}_abs", 0)
    if not negate and not absolute:
        return operand
    return Operand(operand.kind, operand.register, operand.count, operand.value, bool(negate), bool(absolute))


def _operand(decoded: Any, key: str) -> Operand:
    register = getattr(decoded, key)
    code, count = register.offset, decoded.op_regs.get(_canonical(decoded, key), 1)
    # One space of numbers: scalar registers, constants, vector registers (CDNA3 ISA, "SSRC operands").
    if code >= 256:
        return Operand("vector", code - 256 + (ACCUMULATOR if _is_accumulator(decoded, key) else 0), count)
    if code == LITERAL:
        return Operand("constant", count=count, value=_literal(decoded, key))
    if code >= 128:
        return Operand("constant", count=count, value=_inline_constant(code, count))
    return Operand("scalar", code, count)


def _canonical(decoded: Any, key: str) -> str:
    return key[1:] if key.startswith("v") and key[1:] in decoded.op_regs else key


def _is_accumulator(decoded: Any, key: str) -> bool:
    # Moves between the two kinds of registers have no bit for it: their mnemonic says which one is meant.
    for name, keys in ACCUMULATOR_MOVES.items():
        if decoded.op.name.startswith(name):
            return key in keys
    if hasattr(decoded, "acc_cd"):
        # Accumulator and result share one bit; each factor has its own.
        if key in ("vdst", "src2"):
            return bool(decoded.acc_cd)
        return bool(decoded.acc >> (1 if key == "src1" else 0) & 1)
    is_data = key in ("vdst", "vdata", "data", "data0", "data1")
    return is_data and bool(getattr(decoded, "acc", 0))


def _inline_constant(code: int, count: int) -> int:
    mask = (1 << 32 * min(count, 2)) - 1
    # Small integers: 0 to 64, then -1 to -16.
    if code <= 192:
        return code - 128
    if code <= 208:
        return 192 - code & mask
    if code in INLINE_FLOATS:
        return struct.unpack("<I", struct.pack("<f", INLINE_FLOATS[code]))[0]
    if code == 248:
        return INVERSE_2PI
    raise EmulationError("instruction", f"unknown constant operand {code}")


def _literal(decoded: Any, key: str) -> int:
    literal = decoded.literal
    kind = decoded.operands.get(_canonical(decoded, key), ("",))[0]
    if "I64" in str(kind):  # signed numbers of 64 bits extend it with its sign, others with zeros
        return (literal ^ 0x80000000) - 0x80000000 & 0xFFFFFFFFFFFFFFFF
    return literal
