"""Random instances of single gfx942 instructions, with the result that AMD's pseudocode defines.

An instance is the machine code of one instruction, the registers before it and the registers after it. The
encodings come from tinygrad's constructors; modifiers around a formula (signs, clamping, DPP, SDWA) are
applied here as the CDNA3 ISA document words them, because the formulas do not mention them.
"""

import dataclasses
import math
import random
import re
from fractions import Fraction
from typing import Any

import float_bits
from pseudocode import State, Value, formula_of, parse, run
from tinygrad.renderer.amd.dsl import Reg, s, v
from tinygrad.runtime.autogen.amd.cdna import enum, ins

LANES = range(64)
MASK32 = 0xFFFFFFFF
MASK64 = (1 << 64) - 1
VCC, EXEC = 106, 126
SPECIAL_FLOATS = [0.0, 1.0, 0.5, 2.0, 1e-40, 2.0**-126, 2.0**-149, 3.4028234e38, math.inf, 2.5, 3.5, 2.0**24]
SPECIAL_FLOATS += [0.49999997, 8388609.0, 1e-30, 2147483648.0, 4294967296.0, 126.0, 128.0, 149.5]
SPECIAL_INTEGERS = [
    0,
    1,
    2,
    7,
    31,
    32,
    33,
    63,
    64,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0x8000,
    0xFFFF,
    0xFFFFFF,
    0x800000,
]
SPECIAL_INTEGERS += [0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFF, 0xFFFFFFFE, 0x0C0D0B07, 0x00000C0F]
NANS = [0x7FC00000, 0xFFC00000, 0x7FC12345]
SIGNALING_NANS = [0x7F800001, 0xFFA00000]
INLINE_FLOATS = [0.5, -0.5, 1.0, -1.0, 2.0, -2.0, 4.0, -4.0]
REPLACED = {
    # D0 is not set on all paths. Quotients that float32 would round to zero count as denormal too.
    "v_div_scale_f32": lambda text: (
        "D0.f32 = S0.f32;\n" + text.replace("S2.f32 / S1.f32", "64'F(S2.f32) / 64'F(S1.f32)")
    ),
    # Written: 2**32, which cannot undo the 2**64 of v_div_scale; test_division_is_correctly_rounded decides.
    "v_div_fmas_f32": lambda text: "D0.f32 = scaled_fma(S0.f32, S1.f32, S2.f32, VCC.u64[laneId])",
    # Its halves are read beyond the 32 bits that the text names.
    "v_pk_mov_b32": lambda text: text.replace("S0.u32[", "S0.u64[").replace("S1.u32[", "S1.u64["),
    # The text gives 1 for tiny negative numbers; the result is below 1 (LLVM relies on it).
    "v_fract_f32": lambda text: text + ";\nif D0.f32 == 1.0F then\nD0.f32 = 0.99999994F\nendif",
    # Written: floor(S0 + 0.5), which rounds 0.49999997 to 1 and large odd numbers to even ones.
    "v_rndne_f32": lambda text: "D0.f32 = nearest(S0.f32)",
}
"""Formulas whose text is incomplete or wrong, with the reading that is tested instead."""


def formula(name: str) -> str:
    """Returns the text that is tested for an instruction."""
    text = formula_of(name)
    return REPLACED.get(name, lambda text: text)(text)


@dataclasses.dataclass
class Instance:
    """One instruction with the state before and after.

    Attributes:
      name: mnemonic without the suffix of its encoding.
      variant: encoding and modifiers, for counting.
      code: machine code.
      vectors: vector registers before, by number: a value per lane.
      scalars: scalar registers before, by number.
      scc: scalar condition code before.
      after_vectors: expected vector registers.
      after_scalars: expected scalar registers.
      after_scc: expected scalar condition code; None if it keeps its value.
      floats: vector registers that hold floats, for which all NaNs are equal.
      float_width: bits of these numbers.
      inputs: values of the sources in each lane, after modifiers.
      text: the instruction as messages print it.
      local: local memory before, in words; its size is the launch's.
      after_local: expected local memory.
      device: contents of a buffer at address `DEVICE`, in words.
      after_device: expected contents of that buffer; None for one that is only read.
    """

    name: str
    variant: str
    code: bytes
    vectors: dict[int, list[int]]
    scalars: dict[int, int]
    scc: int
    after_vectors: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    after_scalars: dict[int, int] = dataclasses.field(default_factory=dict)
    after_scc: int | None = None
    floats: frozenset[int] = frozenset()
    float_width: int = 32
    inputs: list[list[int]] = dataclasses.field(default_factory=list)
    text: str = ""
    local: list[int] = dataclasses.field(default_factory=list)
    after_local: list[int] = dataclasses.field(default_factory=list)
    device: list[int] = dataclasses.field(default_factory=list)
    after_device: list[int | None] | None = None


@dataclasses.dataclass
class Source:
    """An operand: what the constructor receives, and its value in each lane."""

    field: Any
    values: list[int]
    is_vector: bool


class Draw:
    """Draws values and registers of one instance.

    Attributes:
      rng: source of randomness.
      vectors: vector registers drawn so far.
      scalars: scalar registers drawn so far.
    """

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.vectors: dict[int, list[int]] = {}
        self.scalars: dict[int, int] = {}
        self.next_vector, self.next_scalar = 2, 4
        self.set_scalar(EXEC, self.mask(), 2)
        self.set_scalar(VCC, rng.getrandbits(64), 2)

    def mask(self) -> int:
        """A mask of active lanes, which is sometimes full and never empty."""
        choice = self.rng.random()
        if choice < 0.4:
            return MASK64
        if choice < 0.5:
            return 1 << self.rng.randrange(64)
        return self.rng.getrandbits(64) | 1 << self.rng.randrange(64)

    def number(self, kind: str) -> int:
        """Bits of a random value of a type such as "f32", "u64" or "i16"; 32 bits at least."""
        if kind == "f32":
            return self.float32()
        if kind.endswith("64"):
            high = self.rng.choice([0, MASK32, self.integer()])
            return high << 32 | self.integer()
        return self.integer()

    def float32(self) -> int:
        choice = self.rng.random()
        if choice < 0.35:
            return float_bits.from_float(self.rng.choice(SPECIAL_FLOATS) * self.rng.choice([1, -1]), 32)
        if choice < 0.40:
            return self.rng.choice(NANS + SIGNALING_NANS)
        if choice < 0.50:
            return self.rng.getrandbits(32)
        return float_bits.from_float(self.rng.uniform(-2, 2) * 2.0 ** self.rng.randrange(-12, 12), 32)

    def integer(self) -> int:
        choice = self.rng.random()
        if choice < 0.3:
            return self.rng.choice(SPECIAL_INTEGERS)
        if choice < 0.5:
            return self.rng.randrange(-70, 70) & MASK32
        return self.rng.getrandbits(32)

    def set_scalar(self, number: int, value: int, count: int) -> None:
        for i in range(count):
            self.scalars[number + i] = value >> 32 * i & MASK32

    def vector(self, kind: str, words: int) -> Source:
        """Draws vector registers. A few values repeat in many lanes, so that comparisons hold in some."""
        number = self.next_vector
        self.next_vector += words + words % 2 + self.rng.choice([0, 2])
        pool = [self.number(kind) for _ in range(6)]
        values = [self.rng.choice(pool) if self.rng.random() < 0.4 else self.number(kind) for _ in LANES]
        for i in range(words):
            self.vectors[number + i] = [value >> 32 * i & MASK32 for value in values]
        values = [value & ((1 << 32 * words) - 1) for value in values]
        return Source(v[number] if words == 1 else v[number : number + words - 1], values, True)

    def scalar(self, kind: str, words: int) -> Source:
        number = self.next_scalar
        self.next_scalar += 4
        value = self.number(kind) & ((1 << 32 * words) - 1)
        self.set_scalar(number, value, words)
        return Source(s[number] if words == 1 else s[number : number + words - 1], [value] * 64, False)

    def constant(self, kind: str, words: int) -> Source:
        """Draws an inline constant."""
        if kind == "f32" and self.rng.random() < 0.7:
            number = self.rng.choice(INLINE_FLOATS)
            return Source(number, [float_bits.from_float(number, 32)] * 64, False)
        integer = self.rng.randrange(-16, 65)
        return Source(integer, [integer & ((1 << 32 * words) - 1)] * 64, False)

    def literal(self, kind: str) -> Source:
        value = self.number(kind) & MASK32
        while value <= 64 or value >= MASK32 - 15 or is_inline_float(value):
            value = self.rng.getrandbits(32)
        return Source(value, [value] * 64, False)

    def source(self, kind: str, words: int, *, scalars: bool, literals: bool = False) -> Source:
        """Draws a vector register, or now and then something else.

        Args:
          kind: type of the values.
          words: 32-bit registers.
          scalars: whether the operand may be a scalar register or a constant.
          literals: whether it may be a constant that follows the instruction.
        """
        choice = self.rng.random()
        if not scalars or choice < 0.6:
            return self.vector(kind, words)
        if choice < 0.8:
            return self.scalar(kind, words)
        if literals and words == 1 and choice < 0.9:
            return self.literal(kind)
        return self.constant(kind, words)


def is_inline_float(value: int) -> bool:
    return value in [float_bits.from_float(number, 32) for number in INLINE_FLOATS] or value == 0x3E22F983


def find_opcode(name: str) -> dict[str, Any]:
    """The opcodes of a mnemonic by format: VOP1, VOP2, VOPC, VOP3, VOP3SD, VOP3P, SOP1 and others."""
    formats = [
        "VOP1",
        "VOP2",
        "VOPC",
        "VOP3",
        "VOP3SD",
        "VOP3P",
        "SOP1",
        "SOP2",
        "SOPC",
        "SOPK",
        "SOPP",
        "DS",
    ]
    formats += ["SMEM", "GLOBAL", "MUBUF"]
    found = {}
    for each in formats:
        members = getattr(enum, each + "Op").__members__
        for suffix in ("", "_E32", "_E64"):
            if name.upper() + suffix in members:
                found[each] = members[name.upper() + suffix]
    return found


def source_kinds(text: str, count: int) -> list[str]:
    """Types of the sources, as the formula reads them first."""
    kinds = []
    for i in range(count):
        match = re.search(rf"\bS{i}(?:\[[^\]]*\])?\.([uifb]\d+)", text)
        kinds.append(match[1] if match else "u32")
    return kinds


# ---------------------------------------------------------------- vector instructions


SATURATES = ("v_sub_u32", "v_add_u32", "v_subrev_u32")
"""Instructions of unsigned integers with the modifier clamp."""
READS_MASK = ("v_cndmask_b32", "v_addc_co_u32", "v_subb_co_u32", "v_subbrev_co_u32")
WITH_LITERAL = ("v_fmamk_f32", "v_fmaak_f32")
NO_MODIFIERS = ("v_readlane_b32", "v_readfirstlane_b32", "v_mbcnt_lo_u32_b32", "v_mbcnt_hi_u32_b32")


def vector_instance(name: str, form: str, rng: random.Random) -> Instance:
    """Draws an instance of a vector instruction.

    Args:
      name: mnemonic.
      form: "VOP1", "VOP2", "VOPC", "VOP3", "VOP3SD", or "DPP" or "SDWA" for those variants of the first two.
      rng: source of randomness.
    """
    return _Vector(name, form, rng).build()


class _Vector:
    def __init__(self, name: str, form: str, rng: random.Random):
        self.name, self.form, self.rng, self.draw = name, form, rng, Draw(rng)
        opcodes = find_opcode(name)
        base = next(f for f in ("VOP1", "VOP2", "VOPC") if f in opcodes) if form in ("DPP", "SDWA") else form
        self.base, self.opcode = base, opcodes.get(base)
        self.text = formula(name)
        self.widths = {k: max(1, bits // 32) for k, (_, bits, _) in _operands(self.opcode).items()}
        self.fields: dict[str, Any] = {}
        self.notes: list[str] = []

    def build(self) -> Instance:
        self.kinds = source_kinds(self.text, 3)
        self.sources = self.draw_sources()
        self.modify()
        destination = self.draw_destination()
        before = dict(self.draw.vectors), dict(self.draw.scalars)
        active = self.active_lanes()
        inputs = [self.lane_inputs(lane) for lane in LANES]
        outcome = self.evaluate(active, inputs, destination)
        instance = Instance(
            self.name,
            " ".join([self.form, *self.notes]),
            self.encode(destination).to_bytes(),
            *before,
            scc=self.rng.getrandbits(1),
            inputs=inputs,
            text=repr(self.encode(destination)),
        )
        return self.finish(instance, destination, outcome)

    def keys(self) -> list[str]:
        order = ("src0", "vsrc1" if self.base in ("VOP2", "VOPC") else "src1", "src2")
        return [key for key in order if key in self.widths]

    def draw_sources(self) -> list[Source]:
        """Draws sources within the encoding's limits: VOP3 has one scalar register and no literal."""
        sources: list[Source] = []
        may_be_scalar = self.form not in ("DPP", "SDWA") and self.name not in NO_MODIFIERS[:2]
        for i, key in enumerate(self.keys()):
            if key == "src2" and self.name in READS_MASK:
                sources.append(self.draw.scalar("u64", 2))
                continue
            if self.name == "v_readlane_b32" and i == 1:
                sources.append(self.draw.scalar("u32", 1))
                continue
            earlier = any(isinstance(x.field, Reg) and not x.is_vector for x in sources)
            allowed = may_be_scalar and key != "vsrc1" and not earlier
            if "src2" in self.keys() and self.name in READS_MASK:
                allowed = False
            if self.form == "SDWA" and self.rng.random() < 0.2:
                sources.append(self.draw.scalar(self.kinds[i], 1))
                continue
            literal = allowed and key == "src0" and self.base in ("VOP1", "VOP2", "VOPC")
            literal = literal and self.name not in (*WITH_LITERAL, "v_mov_b64")
            sources.append(
                self.draw.source(self.kinds[i], self.widths[key], scalars=allowed, literals=literal)
            )
        return sources

    def modify(self) -> None:
        """Draws modifiers: signs of numbers, DPP or SDWA controls."""
        self.negative, self.absolute = [0, 0, 0], [0, 0, 0]
        if self.form == "DPP":
            self.fields |= _dpp_fields(self.rng)
            self.notes.append(f"ctrl={self.fields['dpp']:#x}"[:8])
        if self.form == "SDWA":
            self.fields |= _sdwa_fields(self.rng, self.kinds[: len(self.sources)], self.base, self.text)
        if self.name in WITH_LITERAL:
            self.fields["literal"] = self.draw.number("f32")
        numeric = [k == "f32" or self.name == "v_cndmask_b32" for k in self.kinds]
        if self.form in ("VOP3", "VOP3SD", "DPP") and self.name not in NO_MODIFIERS:
            for i in range(len(self.sources)):
                if numeric[i] and i < (2 if self.name in READS_MASK else 3) and self.rng.random() < 0.3:
                    self.negative[i] = 1
                    self.absolute[i] = int(self.form != "VOP3SD" and self.rng.random() < 0.3)
        if any(self.negative):
            self.notes.append("neg")
        self.clamp = self.draw_clamp()
        if self.clamp:
            self.notes.append("clamp")

    def draw_clamp(self) -> int:
        if self.form != "VOP3" or self.base != "VOP3" or self.rng.random() > 0.15:
            return 0
        numeric = "D0.f32" in self.text and not self.name.startswith(("v_cmp", "v_div"))
        return int(numeric or self.name in (*SATURATES, "v_add_i32", "v_sub_i32"))

    def draw_destination(self) -> Source | None:
        if self.name.startswith("v_cmp") or self.name in NO_MODIFIERS[:2]:
            return None
        destination = self.draw.vector("u32", self.widths["vdst"])
        if self.name == "v_fmac_f32":
            destination = self.draw.vector("f32", 1)
        return destination

    def active_lanes(self) -> list[int]:
        mask = self.draw.scalars[EXEC] | self.draw.scalars[EXEC + 1] << 32
        active = [lane for lane in LANES if mask >> lane & 1]
        if self.form != "DPP":
            return active
        self.from_lane = {lane: dpp_source(self.fields["dpp"], lane) for lane in LANES}
        bounded = self.fields["bc"]
        return [
            lane
            for lane in active
            if self.fields["row_mask"] >> lane // 16 & 1
            and self.fields["bank_mask"] >> lane % 16 // 4 & 1
            and (bounded or self.is_valid(lane, mask))
        ]

    def is_valid(self, lane: int, mask: int) -> bool:
        """Whether a lane's DPP source exists and is active."""
        source = self.from_lane[lane]
        return source is not None and bool(mask >> source & 1)

    def lane_inputs(self, lane: int) -> list[int]:
        values = [source.values[lane] for source in self.sources]
        if self.form == "DPP":
            mask = self.draw.scalars[EXEC] | self.draw.scalars[EXEC + 1] << 32
            valid = self.is_valid(lane, mask)
            values[0] = self.sources[0].values[self.from_lane[lane]] if valid else 0
        if self.form == "SDWA":
            values = [
                selected(value, self.fields[f"src{i}_sel"], self.fields[f"src{i}_sext"])
                for i, value in enumerate(values)
            ]
        for i in range(len(values)):
            if self.absolute[i]:
                values[i] &= 0x7FFFFFFF
            if self.negative[i]:
                values[i] ^= 0x80000000
        return values

    def evaluate(
        self, active: list[int], inputs: list[list[int]], destination: Source | None
    ) -> dict[str, Any]:
        """Runs the formula in each active lane."""
        program = parse(self.text)
        mask = self.draw.scalars[EXEC] | self.draw.scalars[EXEC + 1] << 32
        carry = self.carry_in()
        outcome: dict[str, Any] = {"D0": {}, "bits": 0, "carry": 0}
        for lane in active or ([0] if self.name == "v_readlane_b32" else []):
            registers: dict[str, Any] = {f"S{i}": value for i, value in enumerate(inputs[lane])}
            # Instructions of 16 bits clear the upper half on gfx9 (LLVM's zeroesHigh16BitsOfDest).
            keeps = destination is not None and not re.search(r"D0\.[uif]16", self.text)
            registers |= {"D0": destination.values[lane] if keeps else 0, "laneId": Value(lane)}
            registers |= {
                "VCC": carry,
                "EXEC": mask,
                "SRC0": Value(0),
                "SIMM32": self.fields.get("literal", 0),
            }
            state = State(registers, vector=lambda lane, number: self.sources[0].values[lane])
            state.functions |= {"nearest": _nearest, "scaled_fma": _scaled_fma}
            run(program, state)
            result = state.registers["D0"]
            outcome["D0"][lane] = self.after(result) if destination else result
            outcome["bits"] |= result & (1 << lane)
            outcome["carry"] |= self.carry_out(state, lane)
        return outcome

    def carry_in(self) -> int:
        if self.name in READS_MASK and self.base not in ("VOP2", "VOPC"):
            return self.sources[2].values[0]
        return self.draw.scalars[VCC] | self.draw.scalars[VCC + 1] << 32

    def carry_out(self, state: State, lane: int) -> int:
        if self.name == "v_div_scale_f32":
            return (state.registers["VCC"] & 1) << lane
        if self.name == "v_mad_u64_u32":
            return (state.registers["D1"] & 1) << lane
        return state.registers["VCC"] & (1 << lane)

    def after(self, result: int) -> int:
        """Clamps a result, as the modifier says."""
        if not self.clamp:
            return result
        if "D0.f32" not in self.text:
            return 0  # replaced where the exact result is known
        number = float_bits.to_float(result & MASK32, 32)
        # With the mode bit DX10_CLAMP, which XLA's kernels set, NaN becomes 0.
        return float_bits.from_float(min(number, 1.0) if number > 0 else 0.0, 32)

    def saturated(self, lane_values: list[int]) -> int:
        a, b = lane_values[:2]
        if self.name not in SATURATES:
            a, b = ((value ^ 1 << 31) - (1 << 31) for value in (a, b))
            exact = a + b if self.name == "v_add_i32" else a - b
            return max(-(1 << 31), min(exact, (1 << 31) - 1)) & MASK32
        exact = {"v_sub_u32": a - b, "v_add_u32": a + b, "v_subrev_u32": b - a}[self.name]
        return max(0, min(exact, MASK32))

    def encode(self, destination: Source | None) -> Any:
        fields: dict[str, Any] = {key: x.field for key, x in zip(self.keys(), self.sources, strict=True)}
        suffix = {"DPP": "_DPP16", "SDWA": "_SDWA"}.get(self.form, "")
        for i, (key, source) in enumerate(zip(self.keys(), self.sources, strict=True)):
            if self.form == "SDWA" and not source.is_vector:
                # A bit says that the number is that of a scalar register.
                fields |= {key: Reg(256 + source.field.offset, 1), f"s{i}": 1}
        if suffix:
            fields["vsrc0"] = fields.pop("src0")
            fields["src0"] = Reg(250 if self.form == "DPP" else 249, 1)
            if self.base == "VOPC":
                suffix = "_SDWA_SDST"
        if destination:
            fields["vdst"] = destination.field
        if self.base == "VOP3" and self.name.startswith("v_cmp"):
            suffix, fields["vdst"] = "_SDST", s[90:91]
        if self.name in NO_MODIFIERS[:2]:
            fields["vdst"] = Reg(256 + 90, 1)  # the table has a vector register; the number counts
        if self.base == "VOP3SD":
            fields["sdst"] = s[92:93]
        signs = (
            sum(bit << i for i, bit in enumerate(self.negative)),
            sum(b << i for i, b in enumerate(self.absolute)),
        )
        if self.form == "DPP":
            for i in range(min(len(self.sources), 2)):
                fields |= {f"src{i}_neg": self.negative[i], f"src{i}_abs": self.absolute[i]}
        elif self.form in ("VOP3", "VOP3SD"):
            fields["neg"] = signs[0]
            if self.form == "VOP3":
                fields |= {"abs": signs[1], "clmp": self.clamp}
        if self.name in WITH_LITERAL:
            suffix = "_LIT"
        return getattr(ins, self.base + suffix)(self.opcode, **fields, **self.fields)

    def finish(self, instance: Instance, destination: Source | None, outcome: dict[str, Any]) -> Instance:
        """Fills in the registers after the instruction."""
        if destination:
            self.put_vector(instance, destination, outcome["D0"])
        elif self.name.startswith("v_cmp"):
            number = 90 if self.base == "VOP3" else VCC
            instance.after_scalars = _split(number, outcome["bits"])
        else:
            instance.after_scalars = {90: next(iter(outcome["D0"].values())) & MASK32}
        if self.base == "VOP3SD":
            instance.after_scalars = _split(92, outcome["carry"])
        elif "_co_" in self.name:
            instance.after_scalars = _split(VCC, outcome["carry"])
        return instance

    def put_vector(self, instance: Instance, destination: Source, results: dict[int, int]) -> None:
        number = destination.field.offset - 256
        words = self.widths["vdst"]
        if self.clamp and "D0.f32" not in self.text:
            results = {lane: self.saturated(instance.inputs[lane]) for lane in results}
        if self.form == "SDWA":
            results = {
                lane: placed(
                    result, destination.values[lane], self.fields["dst_sel"], self.fields["dst_unused"]
                )
                for lane, result in results.items()
            }
        values = [results.get(lane, destination.values[lane]) for lane in LANES]
        for i in range(words):
            instance.after_vectors[number + i] = [value >> 32 * i & MASK32 for value in values]
        if match := re.search(r"\bD0\.f(16|32)", self.text):
            instance.floats = frozenset(range(number, number + words))
            instance.float_width = int(match[1])


def _operands(opcode: Any) -> dict[str, Any]:
    from tinygrad.runtime.autogen.amd.cdna.operands import OPERANDS

    return OPERANDS[opcode]


def _split(number: int, value: int) -> dict[int, int]:
    return {number: value & MASK32, number + 1: value >> 32 & MASK32}


def _scaled_fma(a: Value, b: Value, c: Value, undo: Value) -> Value:
    """a * b + c, times 2**64 for a large c and 2**-64 for a small one, rounded once."""
    numbers = [float_bits.to_float(value.data, 32) for value in (a, b, c)]
    if not undo.data or not all(map(math.isfinite, numbers)):
        return Value(float_bits.fma(a.data, b.data, c.data, 32), 32, "float")
    x, y, z = map(Fraction, numbers)
    power = 64 if float_bits.biased_exponent(c.data, 32) > 127 else -64
    zero = float_bits.fma(a.data, b.data, c.data, 32)
    negative = float_bits.is_negative(zero, 32)
    return Value(
        float_bits.rounded((x * y + z) * Fraction(2) ** power, 32, negative_zero=negative), 32, "float"
    )


def _nearest(value: Value) -> Value:
    return Value(float_bits.nearest_integer(value.data, 32), 32, "float")


# ---------------------------------------------------------------- DPP and SDWA


def _dpp_fields(rng: random.Random) -> dict[str, int]:
    shift = rng.randrange(1, 16)
    controls = [rng.randrange(256), 0x100 + shift, 0x110 + shift, 0x120 + shift, 0x140, 0x141, 0x142, 0x143]
    return {
        "dpp": rng.choice(controls),
        "bc": rng.getrandbits(1),
        "row_mask": rng.choice([15, 15, 10, rng.randrange(16)]),
        "bank_mask": rng.choice([15, 15, rng.randrange(16)]),
    }


def dpp_source(control: int, lane: int) -> int | None:
    """Returns the lane that DPP reads for a lane; None if it is outside of the row (ISA, "DPP_CTRL")."""
    row, place = lane - lane % 16, lane % 16
    if control < 0x100:  # quad_perm
        return lane - lane % 4 + (control >> 2 * (lane % 4) & 3)
    count = control & 15
    if control < 0x110:  # row_shl
        return lane + count if place + count < 16 else None
    if control < 0x120:  # row_shr
        return lane - count if place >= count else None
    if control < 0x130:  # row_ror
        return row + (place - count) % 16
    if control == 0x140:  # row_mirror
        return row + 15 - place
    if control == 0x141:  # row_half_mirror
        return lane - lane % 8 + 7 - lane % 8
    if control == 0x142:  # row_bcast15: the last lane of the row before
        return row - 1 if row else None
    if control == 0x143:  # row_bcast31: lane 31 to the upper half
        return 31 if lane >= 32 else None
    raise ValueError(f"unknown control {control:#x}")


def _sdwa_fields(rng: random.Random, kinds: list[str], base: str, text: str) -> dict[str, int]:
    fields = {}
    for i, kind in enumerate(kinds):
        # Extension with a sign is defined for integers only.
        extend = 0 if kind == "f32" else rng.getrandbits(1)
        fields |= {f"src{i}_sel": rng.choice([6, 6, *range(6)]), f"src{i}_sext": extend}
    if base != "VOPC":
        whole = "D0.f" in text  # a part of a number that is only defined up to a bound cannot be compared
        fields |= {"dst_sel": 6 if whole else rng.choice([6, 6, *range(6)]), "dst_unused": rng.randrange(3)}
    return fields


def _selection(select: int) -> tuple[int, int]:
    """Lowest bit and width of a selection: BYTE_0 to BYTE_3, WORD_0, WORD_1, DWORD."""
    return (8 * select, 8) if select < 4 else ((16 * (select - 4), 16) if select < 6 else (0, 32))


def selected(value: int, select: int, extend: int) -> int:
    """A part of a source, extended to 32 bits with zeros or with its sign."""
    low, width = _selection(select)
    part = value >> low & ((1 << width) - 1)
    if extend and part >> (width - 1):
        part -= 1 << width
    return part & MASK32


def placed(result: int, old: int, select: int, unused: int) -> int:
    """Puts a result into a part of a register; the rest is 0, the sign above and 0 below, or kept."""
    low, width = _selection(select)
    part = result & ((1 << width) - 1)
    if unused == 2:
        return old & ~(((1 << width) - 1) << low) & MASK32 | part << low
    if unused == 1 and part >> (width - 1):
        part -= 1 << width
    return part << low & MASK32


# ---------------------------------------------------------------- packed numbers


def packed_instance(name: str, rng: random.Random) -> Instance:
    """Draws v_pk_add_f32, v_pk_mul_f32, v_pk_fma_f32 or v_pk_mov_b32; `opsel` chooses halves."""
    draw = Draw(rng)
    text = formula(name)
    opcode = find_opcode(name)["VOP3P"]
    count = 3 if "fma" in name else 2
    kind = "b32" if "mov" in name else "f32"
    sources = [_pair(draw, kind) for _ in range(count)]
    destination = _pair(draw, "b32")
    low, high, negative, negative_high = (rng.getrandbits(count) for _ in range(4))
    if rng.random() < 0.5:
        low, high = 0, (1 << count) - 1
    if kind == "b32":
        negative = negative_high = 0
    fields = {f"src{i}": x.field for i, x in enumerate(sources)}
    fields |= {"opsel": low, "opsel_hi": high & 3, "opsel_hi2": high >> 2 & 1 if count == 3 else 1}
    fields |= {"neg": negative, "neg_hi": negative_high}
    instruction = ins.VOP3P(opcode, vdst=destination.field, **fields)
    mask = draw.scalars[EXEC] | draw.scalars[EXEC + 1] << 32
    number = destination.field.offset - 256
    values = list(destination.values)
    for lane in LANES:
        if not mask >> lane & 1:
            continue
        inputs = [x.values[lane] for x in sources]
        if kind == "f32":  # the formula works on the halves that the modifiers chose
            inputs = [
                _half(x, low >> i & 1) ^ (negative >> i & 1) << 31
                | (_half(x, high >> i & 1) ^ (negative_high >> i & 1) << 31) << 32
                for i, x in enumerate(inputs)
            ]
        registers: dict[str, Any] = {f"S{i}": x for i, x in enumerate(inputs)}
        state = State(registers | {"D0": 0, "OPSEL": low})
        run(parse(text), state)
        values[lane] = state.registers["D0"] & MASK64
    after = {number + i: [value >> 32 * i & MASK32 for value in values] for i in range(2)}
    variant = f"VOP3P opsel={low}{high} neg={int(bool(negative or negative_high))}"
    return Instance(
        name,
        variant,
        instruction.to_bytes(),
        dict(draw.vectors),
        dict(draw.scalars),
        0,
        after,
        floats=frozenset(after) if kind == "f32" else frozenset(),
        text=repr(instruction),
    )


def _pair(draw: Draw, kind: str) -> Source:
    low, high = draw.vector(kind, 1), draw.vector(kind, 1)
    number = draw.next_vector
    draw.next_vector += 2
    draw.vectors[number], draw.vectors[number + 1] = low.values, high.values
    values = [a | b << 32 for a, b in zip(low.values, high.values, strict=True)]
    return Source(v[number : number + 1], values, True)


def _half(value: int, high: int) -> int:
    return value >> 32 * high & MASK32


# ---------------------------------------------------------------- scalar instructions


def scalar_instance(name: str, rng: random.Random) -> Instance:
    """Draws an instance of SOP1, SOP2, SOPC or SOPK."""
    draw = Draw(rng)
    opcodes = find_opcode(name)
    form = next(each for each in ("SOP1", "SOP2", "SOPC", "SOPK") if each in opcodes)
    text, opcode = formula(name), opcodes[form]
    widths = {key: max(1, bits // 32) for key, (_, bits, _) in _operands(opcode).items()}
    kinds = source_kinds(text, 2)
    registers: dict[str, Any] = {"SCC": rng.getrandbits(1)}
    registers["EXEC"] = draw.scalars[EXEC] | draw.scalars[EXEC + 1] << 32
    fields: dict[str, Any] = {}
    for i, key in enumerate(key for key in ("ssrc0", "ssrc1") if key in widths):
        # Only one literal follows an instruction.
        literal = not any(isinstance(x, int) and not -16 <= x <= 64 for x in fields.values())
        source = _scalar_source(draw, kinds[i], widths[key], literal=literal and form != "SOP1")
        source = _bounded_width(name, i, source, draw)
        fields[key], registers[f"S{i}"] = source.field, source.values[0]
    if form == "SOPK":
        _draw_immediate(name, draw, fields, registers)
    if form in ("SOP1", "SOP2"):
        destination = draw.scalar("u64", widths["sdst"])
        fields["sdst"], registers["D0"] = destination.field, destination.values[0]
    before = dict(draw.scalars)
    scc = registers["SCC"]
    state = State(registers)
    run(parse(text), state)
    instruction = getattr(ins, form)(opcode, **fields)
    after = {}
    if form != "SOPC" and not name.startswith("s_cmpk"):
        number = fields["sdst"].offset
        after = {number + i: state.registers["D0"] >> 32 * i & MASK32 for i in range(widths["sdst"])}
    if "saveexec" in name:
        after |= _split(EXEC, state.registers["EXEC"])
    new_scc = state.registers["SCC"]
    new_scc = new_scc if isinstance(new_scc, int) else new_scc.data
    return Instance(
        name, form, instruction.to_bytes(), {}, before, scc, {}, after, new_scc & 1, text=repr(instruction)
    )


def _scalar_source(draw: Draw, kind: str, words: int, *, literal: bool) -> Source:
    choice = draw.rng.random()
    if choice < 0.7:
        return draw.scalar(kind, words)
    if choice < 0.8 and literal and words == 1:
        return draw.literal(kind)
    return draw.constant(kind, words)


def _bounded_width(name: str, i: int, source: Source, draw: Draw) -> Source:
    """s_bfe with widths of 32 and more shifts beyond the register, which the document leaves open."""
    if i != 1 or name not in ("s_bfe_u32", "s_bfe_i32"):
        return source
    value = draw.rng.randrange(32) | draw.rng.randrange(32) << 16
    number = draw.next_scalar
    draw.next_scalar += 4
    draw.set_scalar(number, value, 1)
    return Source(s[number], [value] * 64, False)


def _draw_immediate(name: str, draw: Draw, fields: dict[str, Any], registers: dict[str, Any]) -> None:
    immediate = draw.rng.choice([0, 1, 0x7FFF, 0x8000, 0xFFFF, draw.rng.getrandbits(16)])
    register = draw.scalar("u32", 1)
    if draw.rng.random() < 0.3:  # so that comparisons find equal numbers
        value = immediate if name.endswith("u32") else (immediate ^ 0x8000) - 0x8000 & MASK32
        draw.set_scalar(register.field.offset, value, 1)
        register.values[0] = value
    fields |= {"sdst": register.field, "simm16": immediate}
    # Comparisons have the register as S0 and the constant as S1, all others the constant as S0.
    if name.startswith("s_cmpk"):
        registers |= {"S0": register.values[0], "S1": immediate}
    else:
        registers |= {"S0": immediate, "D0": register.values[0]}


def branch_instance(name: str, rng: random.Random) -> Instance:
    """Draws a branch over one s_mov_b32, whose register says which way was taken."""
    draw = Draw(rng)
    if rng.random() < 0.5:
        draw.set_scalar(VCC, 0, 2)
    if rng.random() < 0.3:
        draw.set_scalar(EXEC, 0, 2)
    draw.set_scalar(20, 5, 1)
    scc = rng.getrandbits(1)
    masks = {key: draw.scalars[n] | draw.scalars[n + 1] << 32 for key, n in (("VCCZ", VCC), ("EXECZ", EXEC))}
    registers: dict[str, Any] = {key: int(mask == 0) for key, mask in masks.items()}
    state = State(registers | {"SCC": scc, "PC": Value(0, 64), "SIMM16": 1})
    run(parse(formula(name)), state)
    branch = ins.SOPP(find_opcode(name)["SOPP"], simm16=1)
    code = branch.to_bytes() + ins.s_mov_b32(s[20], 7).to_bytes()
    taken = state.registers["PC"].data == 8
    before = dict(draw.scalars)
    return Instance(name, "SOPP", code, {}, before, scc, {}, {20: 5 if taken else 7}, scc, text=repr(branch))
