"""Single instructions of the emulator, against AMD's pseudocode in random states.

`pseudocode.py` interprets the formulas, `instances.py` and `memory_instances.py` draw encodings and
operands, and `single_instruction.py` compares all registers and memory, bit by bit; it also lists what the
document leaves open.
"""

import collections
import random
from collections.abc import Callable

import float_bits
import numpy as np
import pytest
from instances import (
    Instance,
    branch_instance,
    find_opcode,
    packed_instance,
    scalar_instance,
    vector_instance,
)
from memory_instances import (
    device_instance,
    local_instance,
    permute_instance,
    scalar_load_instance,
    swizzle_instance,
)
from mnemonics import OF_KERNELS, OTHERS, STATELESS
from pseudocode import State, formula_of, parse, run
from single_instruction import differences, machine_of
from tinygrad.renderer.amd.dsl import VCC, s, v
from tinygrad.runtime.autogen.amd.cdna import ins

from pallas_kernels.emulator import EmulationError, Emulator, KernelCode, KernelLaunch

WITHOUT_PARTS = ("v_fmamk_f32", "v_fmaak_f32", "v_readfirstlane_b32", "v_mov_b64")
"""Instructions of VOP1 and VOP2 without DPP and SDWA forms."""
Builder = Callable[[random.Random], Instance]


def builders(name: str) -> dict[str, Builder]:
    """Functions that draw instances of a mnemonic, by the form of their encoding."""
    opcodes = find_opcode(name)
    if name.startswith("v_mfma") or name in STATELESS:
        return {}
    for prefixes, build in MEMORY.items():
        if name.startswith(prefixes):
            return {"memory": lambda rng, build=build: build(name, rng)}
    if name.startswith("v_pk"):
        return {"VOP3P": lambda rng: packed_instance(name, rng)}
    if name.startswith("v_"):
        forms = [form for form in opcodes if form.startswith("VOP")]
        if {"VOP1", "VOP2"} & set(forms) and name not in WITHOUT_PARTS:
            forms += ["DPP", "SDWA"]
        return {form: lambda rng, form=form: vector_instance(name, form, rng) for form in forms}
    build = branch_instance if "branch" in name else scalar_instance
    return {"scalar": lambda rng: build(name, rng)}


MEMORY: dict[tuple[str, ...], Callable[[str, random.Random], Instance]] = {
    ("ds_read", "ds_write"): local_instance,
    ("ds_bpermute",): permute_instance,
    ("ds_swizzle",): lambda name, rng: swizzle_instance(rng),
    ("global_", "buffer_"): device_instance,
    ("s_load",): scalar_load_instance,
}


def check_instances(seed: int, each: int) -> tuple[collections.Counter, collections.Counter]:
    """Runs instances of all mnemonics and forms.

    Returns:
      Numbers of compared and of refused instances, by mnemonic and form.
    """
    rng = random.Random(seed)
    compared, refused = collections.Counter(), collections.Counter()
    for name in OF_KERNELS + OTHERS:
        for form, build in builders(name).items():
            for _ in range(each):
                instance = build(rng)
                machine = machine_of(instance)
                if not runs(machine):
                    refused[name, form] += 1
                    continue
                messages = differences(instance, machine)
                assert not messages, f"{instance.text} ({instance.variant}): {messages[:4]}"
                compared[name, form] += 1
    return compared, refused


def runs(machine: Emulator) -> bool:
    """Runs an instruction. Returns False if the emulator refuses a modifier, which it must never ignore."""
    try:
        machine.run()
    except EmulationError as error:
        if error.check != "instruction":
            raise
        return False
    return True


def check_coverage(compared: collections.Counter, refused: collections.Counter, least: int) -> None:
    print(f"{compared.total()} instances of {len({name for name, _ in compared})} mnemonics agree")
    expected = {name for name in OF_KERNELS + OTHERS if builders(name)}
    assert {name for name, _ in compared} == expected
    # Only forms that no kernel uses may be refused: carries and numbers of 64 bits with DPP or SDWA.
    assert {form for _, form in refused} <= {"DPP", "SDWA"}
    assert compared.total() >= least


def test_instructions_agree_with_the_pseudocode():
    check_coverage(*check_instances(seed=20, each=2), least=600)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", range(4))
def test_many_instances_agree_with_the_pseudocode(seed):
    print("seed", seed)
    check_coverage(*check_instances(seed=seed, each=12), least=2000)


# ---------------------------------------------------------------- the reference itself


def evaluated(name: str, *sources: int, **registers: int) -> int:
    """Result of an instruction's formula."""
    state = State({f"S{i}": value for i, value in enumerate(sources)} | {"D0": 0, "VCC": 0} | registers)
    run(parse(formula_of(name)), state)
    return state.registers["D0"]


def as_bits(number: float) -> int:
    return int(np.float32(number).view(np.uint32))


@pytest.mark.parametrize(
    ("name", "sources", "expected"),
    [
        ("v_add_u32", (0xFFFFFFFF, 2), 1),
        ("v_bfe_i32", (0x80000000, 20, 23), 0xFFFFF800),
        ("v_bfe_u32", (0xDEADBEEF, 8, 8), 0xBE),
        ("v_bfrev_b32", (1,), 0x80000000),
        ("v_perm_b32", (0x80112233, 0x44556677, 0x0C0D0B07), 0x00FFFF80),
        ("v_alignbit_b32", (1, 0x80000000, 31), 3),
        ("v_mad_i32_i24", (0xFFFFFF, 5, 7), 2),
        ("v_med3_i32", (5, 0xFFFFFFFF, 3), 3),
        ("v_cvt_i32_f32", (as_bits(-3e9),), 0x80000000),
        ("v_max_f32", (as_bits(-0.0), as_bits(0.0)), 0),
        ("v_floor_f32", (as_bits(-0.5),), as_bits(-1.0)),
        ("v_ldexp_f32", (as_bits(1.5), 0xFFFFFF6B), 2),
        ("v_lshlrev_b64", (65, 3), 6),
    ],
)
def test_pseudocode_of_known_values(name, sources, expected):
    assert evaluated(name, *sources) & 0xFFFFFFFF == expected


def test_exact_arithmetic_agrees_with_numpy():
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 2**32, (400, 2), dtype=np.uint32)
    with np.errstate(all="ignore"):
        for a, b in bits:
            x, y = a.view(np.float32), b.view(np.float32)
            operations = {float_bits.add: x + y, float_bits.multiply: x * y, float_bits.divide: x / y}
            for function, expected in operations.items():
                result = function(int(a), int(b), 32)
                assert result == int(expected.view(np.uint32)) or (
                    np.isnan(expected) and float_bits.is_nan(result, 32)
                )


def test_fused_multiply_add_rounds_once():
    # The product is 1 + 2**-11 + 2**-24: half a unit beyond 1 + 2**-11, which only the addend decides.
    a = as_bits(1 + 2.0**-12)
    assert float_bits.fma(a, a, as_bits(2.0**-80), 32) == as_bits(1 + 2.0**-11) + 1
    assert float_bits.fma(a, a, as_bits(-(2.0**-80)), 32) == as_bits(1 + 2.0**-11)


# ---------------------------------------------------------------- parts of numbers


def test_mantissa_and_exponent_are_those_of_c():
    """The document's formula has another exponent for 0 and denormals than what LLVM's frexp relies on."""
    code = [ins.v_frexp_mant_f32_e32(v[3], v[2]), ins.v_frexp_exp_i32_f32_e32(v[4], v[2]), ins.s_endpgm()]
    kernel = KernelCode("instructions", b"".join(instruction.to_bytes() for instruction in code))
    machine = Emulator(kernel, KernelLaunch(grid=(40, 1, 1), threads=64))
    bits = np.random.default_rng(6).integers(0, 2**32, (40, 64), dtype=np.uint32)
    bits[0] = np.arange(64) * 0x00010001  # zero and denormals
    bits[1] = 0x7F800000 | np.arange(64) % 2 * 0x80000000
    machine.registers.write32(2, bits, np.ones((40, 64), bool))
    machine.run()
    numbers = bits.view(np.float32)
    is_number = ~np.isnan(numbers)
    # NumPy warns of signaling NaNs on CPUs without vectors of 512 bits.
    mantissa, exponent = np.frexp(np.where(is_number, numbers, 0))
    exponent[np.isinf(numbers)] = 0
    np.testing.assert_array_equal(
        machine.registers.vector[3].view(np.float32)[is_number], mantissa[is_number]
    )
    np.testing.assert_array_equal(machine.registers.vector[4].view(np.int32)[is_number], exponent[is_number])


# ---------------------------------------------------------------- division


def test_division_is_correctly_rounded():
    """The sequence that LLVM emits for a float32 quotient, which no single formula of the document confirms.

    It decides what `v_div_scale` and `v_div_fmas` do: with the document's factor 2**32, one quotient in eight
    is wrong. Quotients that overflow are excluded: v_div_fixup's text makes NaN of them.
    """
    code = [
        ins.v_div_scale_f32(v[4], s[4:5], v[3], v[3], v[2]),
        ins.v_div_scale_f32(v[5], VCC, v[2], v[3], v[2]),
        ins.v_rcp_f32_e32(v[6], v[4]),
        ins.v_fma_f32_e64(v[7], -v[4], v[6], 1.0),
        ins.v_fma_f32_e64(v[6], v[7], v[6], v[6]),
        ins.v_mul_f32_e32(v[7], v[5], v[6]),
        ins.v_fma_f32_e64(v[8], -v[4], v[7], v[5]),
        ins.v_fma_f32_e64(v[7], v[8], v[6], v[7]),
        ins.v_fma_f32_e64(v[4], -v[4], v[7], v[5]),
        ins.v_div_fmas_f32_e64(v[4], v[4], v[6], v[7]),
        ins.v_div_fixup_f32_e64(v[2], v[4], v[3], v[2]),
        ins.s_endpgm(),
    ]
    kernel = KernelCode("instructions", b"".join(instruction.to_bytes() for instruction in code))
    machine = Emulator(kernel, KernelLaunch(grid=(40, 1, 1), threads=1024))
    bits = np.random.default_rng(5).integers(0, 2**32, (2, 640, 64), dtype=np.uint32)
    for number in range(2):
        machine.registers.write32(2 + number, bits[number], np.ones((640, 64), bool))
    machine.run()
    numerator, denominator = bits.view(np.float32)
    with np.errstate(all="ignore"):
        expected = numerator / denominator
    counts = np.isfinite(expected)
    assert counts.sum() > 30_000
    np.testing.assert_array_equal(machine.registers.vector[2][counts], expected.view(np.uint32)[counts])
