"""Which lanes and which parts of registers an instruction reads and writes: DPP and SDWA modifiers.

Source: CDNA3 instruction set architecture, sections "SDWA" and "DPP".
"""

import dataclasses

import numpy as np

from pallas_kernels.emulator.errors import EmulationError, unknown
from pallas_kernels.emulator.instruction import GpuInstruction
from pallas_kernels.emulator.registers import LANES, Registers

LANE = np.arange(LANES)
ROW = LANE // 16 * 16
"""First lane of each lane's row of 16."""
OUTSIDE = -1
WHOLE = 6
"""SDWA selection of all 32 bits; 0 to 3 are bytes, 4 and 5 halves."""
KEEP_SIGN, PRESERVE = 1, 2
"""SDWA treatment of the bits of the destination that are not selected; 0 clears them."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """Modifiers of an instruction.

    Attributes:
      parts: SDWA selection of each source; empty without SDWA.
      extend: whether each selected part is extended with its sign.
      destination: SDWA selection of the result.
      source_lanes: DPP: lane that each lane reads the first source from; None without DPP.
      enabled: DPP: lanes of enabled rows and banks.
      zero_outside: DPP: whether lanes without a valid source read 0; otherwise they keep their result.
      outside: DPP: bits that lanes without a valid source read: 0, or -0 where the source is negated.
    """

    parts: tuple[int, ...] = ()
    extend: tuple[bool, ...] = ()
    destination: int = WHOLE
    source_lanes: np.ndarray | None = None
    enabled: np.ndarray | None = None
    zero_outside: bool = False
    outside: int = 0

    def apply(
        self, values: list[np.ndarray], registers: Registers
    ) -> tuple[list[np.ndarray], np.ndarray | None]:
        """Returns the modified sources, and the lanes to write; None for the active ones."""
        if self.parts:
            # A third source, such as the sum of v_fmac_f32, has no selection.
            selected = zip(values, self.parts, self.extend, strict=False)
            chosen = [_select_part(value, part, extend) for value, part, extend in selected]
            return [*chosen, *values[len(self.parts) :]], None
        if self.source_lanes is None:
            return values, None
        first = np.broadcast_to(values[0], (registers.count, LANES))
        # Lanes without a source index some lane, whose value is not used.
        lanes = np.maximum(self.source_lanes, 0)
        valid = (self.source_lanes != OUTSIDE) & registers.exec[:, lanes]
        outside = np.array(self.outside, f"u{first.dtype.itemsize}").view(first.dtype)
        moved = np.where(valid, first[:, lanes], outside)
        writes = registers.exec & self.enabled & (valid | self.zero_outside)
        return [moved, *values[1:]], writes

    def place(self, value: np.ndarray) -> np.ndarray:
        """Puts the result into the selected part of the destination, whose other bits become 0."""
        if self.destination == WHOLE:
            return value
        size = 8 if self.destination < 4 else 16
        shift = 8 * self.destination if self.destination < 4 else 16 * (self.destination - 4)
        bits = np.ascontiguousarray(value).view(np.uint32)
        return (bits & np.uint32((1 << size) - 1)) << np.uint32(shift)


def selection_of(instruction: GpuInstruction) -> Selection:
    """Returns the modifiers of an instruction.

    Raises:
      EmulationError: for a modifier that the emulator does not know.
    """
    fields = instruction.fields
    if "dpp" in fields:
        return _dpp(instruction)
    if "src0_sel" not in fields:
        return Selection()
    destination, unused = fields.get("dst_sel", WHOLE), fields.get("dst_unused", 0)
    if instruction.name.endswith("64"):
        raise EmulationError("instruction", f"SDWA selects parts of 32 bits: {instruction.text}")
    if fields.get("omod") or (destination != WHOLE and unused):
        raise unknown(f"this SDWA form: {instruction.text}")
    if any(source.negate or source.absolute for source in instruction.sources):
        raise unknown(f"SDWA with signs: {instruction.text}")
    # The condition code, which v_cndmask reads too, has no selection.
    number = sum(source.register != 106 or source.kind != "scalar" for source in instruction.sources)
    parts = tuple(fields[f"src{n}_sel"] for n in range(min(number, 2)))
    extend = tuple(bool(fields[f"src{n}_sext"]) for n in range(min(number, 2)))
    return Selection(parts=parts, extend=extend, destination=destination)


def _select_part(value: np.ndarray, part: int, extend: bool) -> np.ndarray:
    if part == WHOLE:
        return value
    # Selections are of bits, whatever type the formula reads.
    bits = np.ascontiguousarray(value).view(np.uint32)
    size = 8 if part < 4 else 16
    shift = 8 * part if part < 4 else 16 * (part - 4)
    field = bits >> np.uint32(shift) & np.uint32((1 << size) - 1)
    if extend:
        sign = np.uint32(1 << size - 1)
        field = (field ^ sign) - sign
    return field.view(value.dtype)


def _dpp(instruction: GpuInstruction) -> Selection:
    fields = instruction.fields
    rows, banks = fields["row_mask"], fields["bank_mask"]
    enabled = (rows >> LANE // 16 & 1 == 1) & (banks >> LANE % 16 // 4 & 1 == 1)
    lanes = dpp_lanes(fields["dpp"])
    if lanes is None:
        raise unknown(f"this DPP control: {instruction.text}")
    outside = 0x80000000 if instruction.sources[0].negate else 0
    return Selection(source_lanes=lanes, enabled=enabled, zero_outside=bool(fields["bc"]), outside=outside)


def dpp_lanes(control: int) -> np.ndarray | None:
    """Returns the lane that each lane reads for a DPP control, [64]; None for an unknown control."""
    column = LANE % 16
    if control <= 0xFF:  # quad_perm: two bits for each lane of four
        return LANE // 4 * 4 + (control >> 2 * (LANE % 4) & 3)
    kind, count = control & 0x1F0, control & 0xF
    if kind == 0x100 and count:  # row_shl
        return np.where(column + count < 16, LANE + count, OUTSIDE)
    if kind == 0x110 and count:  # row_shr
        return np.where(column - count >= 0, LANE - count, OUTSIDE)
    if kind == 0x120 and count:  # row_ror
        return ROW + (column - count) % 16
    others = {
        0x130: np.where(LANE < 63, LANE + 1, OUTSIDE),  # wave_shl
        0x134: (LANE + 1) % 64,  # wave_rol
        0x138: np.where(LANE > 0, LANE - 1, OUTSIDE),  # wave_shr
        0x13C: (LANE - 1) % 64,  # wave_ror
        0x140: ROW + 15 - column,  # row_mirror
        0x141: LANE // 8 * 8 + 7 - LANE % 8,  # row_half_mirror
        0x142: np.where(LANE >= 16, ROW - 1, OUTSIDE),  # row_bcast:15
        0x143: np.where(LANE >= 32, 31, OUTSIDE),  # row_bcast:31
    }
    return ROW + count if kind == 0x150 else others.get(control)  # 0x150: row_newbcast
