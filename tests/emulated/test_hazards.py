"""The static check of wait states, on code that keeps and that violates each rule."""

import pytest
from hazards import BRANCHY_STORE, FIRST_PATH, Hazard, find_hazards
from matrix_code import MatrixCode
from tinygrad.renderer.amd.dsl import DPP, EXEC_HI, SDWA, VCC, s, v
from tinygrad.runtime.autogen.amd.cdna import ins

from pallas_kernels.emulator import KernelCode
from pallas_kernels.emulator.decode import decode


def mfma(destination=0, first=32, second=34, addend=None, *, kind="bf16", size=32):
    """A matrix instruction whose addend is its result's registers, unless another one is named."""
    name = {
        ("bf16", 32): "V_MFMA_F32_32X32X8_BF16",
        ("bf16", 16): "V_MFMA_F32_16X16X16_BF16",
        ("f32", 32): "V_MFMA_F32_32X32X2_F32",
        ("f32", 16): "V_MFMA_F32_16X16X4_F32",
        ("xf32", 32): "V_MFMA_F32_32X32X4_XF32",
    }[kind, size]
    counts = 16 if size == 32 else 4, 1 if kind == "f32" else 2
    return MatrixCode(name, (destination, first, second, destination if addend is None else addend), counts)


def hazards_of(*instructions) -> list[Hazard]:
    code = b"".join(instruction.to_bytes() for instruction in (*instructions, ins.s_endpgm()))
    return find_hazards(KernelCode("instructions", code))


def wait(states: int) -> list:
    """Instructions that take a number of wait states."""
    return [ins.s_nop(simm16=min(states - at, 8) - 1) for at in range(0, states, 8)]


READ_V0 = ins.v_add_f32_e32(v[60], v[0], v[61])
EXP_V0 = ins.v_exp_f32_e32(v[60], v[0])
WRITE_V0 = ins.v_mov_b32_e32(v[0], v[61])
WRITE_VCC = ins.v_cmp_eq_u32_e32(v[1], v[2])
RULES = {
    "bf16 matrix to vector": (mfma(), READ_V0, 11),
    "bf16 matrix of 16 rows to vector": (mfma(size=16), READ_V0, 7),
    "float32 matrix to vector": (mfma(kind="f32"), READ_V0, 18),
    "float32 matrix of 16 rows to vector": (mfma(kind="f32", size=16), READ_V0, 10),
    "xf32 matrix to vector": (mfma(kind="xf32"), READ_V0, 11),
    "matrix to v_exp of inline assembly": (mfma(), EXP_V0, 11),
    "matrix to local memory": (mfma(), ins.ds_write_b32(addr=v[60], data0=v[0]), 11),
    "matrix to a store": (
        mfma(),
        ins.GLOBAL(ins.GLOBALOp.GLOBAL_STORE_DWORD, addr=v[60], data=v[0], saddr=EXEC_HI),
        11,
    ),
    "matrix overwritten": (mfma(), WRITE_V0, 11),
    "matrix overwritten by a load": (mfma(), ins.ds_read_b32(v[0], v[60]), 11),
    "matrix to a factor": (mfma(), mfma(40, first=0), 11),
    "matrix to another addend": (mfma(), mfma(40, addend=2), 9),
    "float32 matrix to a factor": (mfma(kind="f32"), mfma(40, first=0, kind="f32"), 18),
    "float32 matrix to another addend": (mfma(kind="f32"), mfma(40, addend=2, kind="f32"), 16),
    "addend overwritten": (mfma(40, addend=0), WRITE_V0, 7),
    "addend of 16 rows overwritten": (mfma(40, addend=0, size=16), WRITE_V0, 3),
    "vector to matrix": (ins.v_mov_b32_e32(v[33], v[60]), mfma(), 2),
    "v_exp to matrix": (ins.v_exp_f32_e32(v[33], v[60]), mfma(), 2),
    "v_exp to vector": (ins.v_exp_f32_e32(v[0], v[60]), READ_V0, 1),
    "vector to readfirstlane": (WRITE_V0, ins.v_readfirstlane_b32_e32(v[20], v[0]), 1),
    "vector's scalar to vector": (WRITE_VCC, ins.v_cndmask_b32_e32(v[3], v[4], v[5]), 2),
    "vector's scalar to readlane": (
        ins.v_readfirstlane_b32_e32(v[20], v[60]),  # the table has vector registers for s20
        ins.VOP3(ins.VOP3Op.V_READLANE_B32, vdst=v[21], src0=v[61], src1=s[20]),
        4,
    ),
    "vector's scalar to memory": (
        ins.v_readfirstlane_b32_e32(v[20], v[60]),
        ins.GLOBAL(ins.GLOBALOp.GLOBAL_LOAD_DWORD, vdst=v[1], addr=v[2], saddr=s[20:21]),
        5,
    ),
    "VCC to v_div_fmas": (WRITE_VCC, ins.v_div_fmas_f32_e64(v[3], v[4], v[5], v[6]), 4),
    "vector to DPP": (WRITE_V0, ins.VOP1_DPP16(ins.VOP1Op.V_MOV_B32_E32, vdst=v[1], src0=DPP, vsrc0=v[0]), 2),
    "part of a register": (
        ins.VOP1_SDWA(ins.VOP1Op.V_MOV_B32_E32, vdst=v[0], src0=SDWA, vsrc0=v[1], src0_sel=6, dst_sel=4),
        READ_V0,
        1,
    ),
    "data of a wide store": (
        ins.GLOBAL(ins.GLOBALOp.GLOBAL_STORE_DWORDX4, addr=v[60], data=v[0:3], saddr=EXEC_HI),
        WRITE_V0,
        2,
    ),
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_needs_its_wait_states(rule):
    first, second, states = RULES[rule]
    assert not hazards_of(first, *wait(states), second)
    found = hazards_of(first, *wait(states - 1), second)
    assert [(hazard.needed, hazard.found) for hazard in found] == [(states, states - 1)], found


@pytest.mark.parametrize(
    "pair",
    [
        (mfma(), mfma()),  # a sum over K: the result is forwarded to the same addend
        (mfma(kind="f32"), mfma(kind="f32")),
        (mfma(), ins.v_mov_b32_e32(v[60], v[61])),
        (ins.v_mov_b32_e32(v[0], v[1]), READ_V0),
        (ins.v_exp_f32_e32(v[0], v[1]), ins.v_exp_f32_e32(v[2], v[0])),
        (mfma(40, addend=0, kind="f32"), WRITE_V0),  # only the wide unit reads its addend late
        (ins.s_mov_b64(VCC, s[0:1]), ins.v_div_fmas_f32_e64(v[3], v[4], v[5], v[6])),
    ],
)
def test_what_the_hardware_interlocks_is_no_hazard(pair):
    assert not hazards_of(*pair)


def test_inline_exp_of_a_matrix_result_is_found_and_has_no_excuse():
    """backend.exp2 is inline assembly: LLVM would not protect `exp2(dot(q, k))` without a product between."""
    (hazard,) = hazards_of(mfma(), *wait(10), EXP_V0)
    assert "v_exp_f32" in hazard.text
    assert hazard.known_defect is None
    over_branch = hazards_of(mfma(), *wait(9), ins.s_branch(simm16=1), WRITE_V0, EXP_V0)
    assert [h.known_defect for h in over_branch if "v_exp" in h.text] == [None]
    # A product between makes the compiler wait for the product's operand.
    scaled = [mfma(), *wait(11), ins.v_mul_f32_e32(v[62], v[0], v[61]), ins.v_exp_f32_e32(v[60], v[62])]
    assert not hazards_of(*scaled)


def test_all_paths_are_searched():
    # Over the branch the distance is one short; the path that falls through is long enough.
    code = [mfma(), ins.s_cbranch_scc1(simm16=1), *wait(8), *wait(1), READ_V0]
    (hazard,) = hazards_of(*code)
    assert (hazard.found, hazard.path.over_branch) == (2, True)
    assert hazard.known_defect is None


def test_a_short_path_of_llvm_is_a_known_defect_only_after_another_matrix():
    branch = [ins.s_cbranch_scc1(simm16=1), *wait(8), *wait(1), READ_V0]
    (hazard,) = hazards_of(mfma(), mfma(40, first=60, second=62), *wait(7), *branch)
    assert (hazard.found, hazard.needed, hazard.known_defect) == (10, 11, FIRST_PATH)
    (alone,) = hazards_of(mfma(), *wait(8), *branch)
    assert (alone.found, alone.needed, alone.known_defect) == (10, 11, None)


def test_loops_are_searched_backwards():
    # The last instruction of the body is one state before the first one of the next round.
    code = [READ_V0, *wait(8), *wait(8), mfma(), ins.s_cbranch_scc1(simm16=0x10000 - 6)]
    (hazard,) = hazards_of(*code)
    assert hazard.pc == 0
    assert hazard.found == 1


def test_a_value_that_is_overwritten_is_judged_by_its_last_write():
    found = hazards_of(mfma(), WRITE_V0, READ_V0)
    assert {hazard.text for hazard in found} == {decode_text(WRITE_V0)}


def decode_text(instruction) -> str:
    return decode(KernelCode("instructions", instruction.to_bytes()))[0].text


def test_a_wide_store_before_a_join_is_a_known_defect():
    store = ins.GLOBAL(ins.GLOBALOp.GLOBAL_STORE_DWORDX4, addr=v[60], data=v[0:3], saddr=EXEC_HI)
    scalar = ins.s_or_b64(s[2:3], s[2:3], s[4:5])
    # Lanes that do not store skip the store: the branch joins at the scalar instruction.
    skip = ins.s_cbranch_execz(simm16=2)
    (hazard,) = hazards_of(skip, store, scalar, WRITE_V0)
    assert (hazard.needed, hazard.found, hazard.known_defect) == (2, 1, BRANCHY_STORE)
    (within_block,) = hazards_of(store, scalar, WRITE_V0)
    assert within_block.known_defect is None
    (worse,) = hazards_of(ins.s_cbranch_execz(simm16=2), store, WRITE_V0)
    assert worse.known_defect is None
