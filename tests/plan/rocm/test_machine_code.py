"""Loops in gfx942 machine code. The words of each instruction are from LLVM's assembler."""

import struct

import pytest

from zaya_jax.plan.rocm.machine_code import Loop, main_loop

MATRIX = (0xD3E00000, 0x044A0902)  # v_mfma_f32_32x32x8_bf16 v[0:15], v[2:3], v[4:5], v[18:33]
SMALL_MATRIX = (0xD3E10000, 0x040A0902)  # v_mfma_f32_16x16x16_bf16 v[0:3], v[2:3], v[4:5], v[2:5]
ADD = (0x2602009F,)  # v_and_b32_e32 v1, 31, v0
LITERAL = (0x260202FF, 0x00012345)  # v_and_b32_e32 v1, 0x12345, v1
EXPONENTIAL = (0x7E024101,)  # v_exp_f32_e32 v1, v1
LOAD = (0xDC548000, 0x04140002)  # global_load_dwordx2 v[4:5], v2, s[20:21]
LOCAL = (0xD8EC0000, 0x00000001)  # ds_read_b64 v[0:1], v1
BARRIER = (0xBF8A0000,)  # s_barrier
END = (0xBF810000,)  # s_endpgm


def back_over(*body):
    """s_cbranch_scc1 to the first of the preceding instructions."""
    words = sum(map(len, body)) + 1
    return (*body, (0xBF850000 | (0x10000 - words),))


def code(*instructions):
    words = [word for instruction in instructions for word in instruction]
    return struct.pack(f"<{len(words)}I", *words)


def test_a_loop_is_counted():
    body = back_over(LOAD, BARRIER, LOCAL, LOCAL, MATRIX, SMALL_MATRIX, ADD, LITERAL, EXPONENTIAL, BARRIER)
    assert main_loop(code(ADD, ADD, *body, MATRIX, END)) == Loop(
        instructions=11,
        matrix=2,
        matrix_cycles=32 + 16,
        vector=3,
        vector_cycles=4 + 4 + 16,
        local=2,
        memory=1,
        barriers=2,
    )


def test_of_several_loops_the_innermost_with_most_products_is_the_main_one():
    small, large = back_over(MATRIX, ADD), back_over(MATRIX, MATRIX)
    result = main_loop(code(*back_over(ADD, *small, *large, BARRIER), *back_over(*[ADD] * 50), END))
    assert result is not None
    assert (result.instructions, result.matrix, result.barriers) == (3, 2, 0)


def test_of_loops_with_as_many_products_the_shortest_is_the_main_one():
    """The other loop also contains masks."""
    result = main_loop(code(*back_over(MATRIX, ADD, ADD), *back_over(MATRIX, ADD), END))
    assert result is not None
    assert (result.matrix, result.vector) == (1, 1)


def test_without_products_it_is_the_longest():
    result = main_loop(code(*back_over(ADD), *back_over(ADD, LOAD, ADD), END))
    assert result is not None
    assert (result.instructions, result.vector, result.memory) == (4, 2, 1)


def test_a_literal_that_looks_like_a_branch_is_none():
    """The second word of an instruction is not decoded as another one."""
    branch = back_over(ADD)[-1][0]
    assert main_loop(code(ADD, (LITERAL[0], branch), END)) is None


def test_code_without_a_loop_has_none():
    assert main_loop(code(ADD, MATRIX, END)) is None
    assert main_loop(b"") is None


@pytest.mark.parametrize(("waves", "share"), [(1, 512 / 768), (2, 1.0), (4, 1.0)])
def test_one_wave_uses_one_unit_after_the_other(waves, share):
    loop = Loop(
        instructions=80, matrix=16, matrix_cycles=512, vector=64, vector_cycles=256, local=0, memory=0,
        barriers=0,
    )  # fmt: skip
    assert loop.matrix_share(waves) == pytest.approx(share)
