"""Matrix instructions against AMD's published layouts of registers and lanes, on exact products.

The formulas are those of AMD's matrix instruction calculator
(github.com/ROCm/amd_matrix_instruction_calculator, CDNA3, `--get-register`) for one block of M x N x K: a
lane holds L = K / (64 / M) consecutive k of a row of A or of a column of B,

    A[i][k]: lane i + M (k / L), entry k mod L;    B[k][j]: lane j + N (k / L), entry k mod L;
    32 x 32: C[i][j]: lane j + 32 ((i / 4) mod 2), register 4 (i / 8) + i mod 4;
    16 x 16: C[i][j]: lane j + 16 (i / 4), register i mod 4.

They are evaluated element by element here, in the direction from an element to its place, unlike in the
emulator.
"""

import numpy as np
import pytest
from matrix_code import MatrixCode
from tinygrad.runtime.autogen.amd.cdna import ins

from pallas_kernels.emulator import Emulator, KernelCode, KernelLaunch

FORMS = {
    "V_MFMA_F32_32X32X8_BF16": (32, 8, "bf16"),
    "V_MFMA_F32_16X16X16_BF16": (16, 16, "bf16"),
    "V_MFMA_F32_32X32X8_F16": (32, 8, "f16"),
    "V_MFMA_F32_16X16X16_F16": (16, 16, "f16"),
    "V_MFMA_F32_32X32X2_F32": (32, 2, "f32"),
    "V_MFMA_F32_16X16X4_F32": (16, 4, "f32"),
    "V_MFMA_F32_32X32X4_XF32": (32, 4, "f32"),
    "V_MFMA_F32_16X16X8_XF32": (16, 8, "f32"),
}
"""Rows and columns, inner size and type of the entries in registers."""
RESULT, FIRST, SECOND, ADDEND = 0, 32, 40, 48
EVERY_LANE = np.ones((1, 64), bool)


def factor_place(index: int, k: int, size: int, inner: int) -> tuple[int, int]:
    """Lane and entry of A[index][k] or B[k][index]."""
    entries = inner // (64 // size)
    return index + size * (k // entries), k % entries


def result_place(i: int, j: int, size: int) -> tuple[int, int]:
    """Lane and register of C[i][j]."""
    if size == 32:
        return j + 32 * (i // 4 % 2), 4 * (i // 8) + i % 4
    return j + 16 * (i // 4), i % 4


def entry_bits(value: float, kind: str) -> int:
    if kind == "f16":
        return int(np.float16(value).view(np.uint16))
    bits = int(np.float32(value).view(np.uint32))
    return bits >> 16 if kind == "bf16" else bits


def factor_registers(matrix: np.ndarray, kind: str) -> np.ndarray:
    """Registers of a factor with rows of k, [registers, 64]."""
    size, inner = matrix.shape
    width = 32 if kind == "f32" else 16
    registers = np.zeros((inner // (64 // size) * width // 32, 64), np.uint32)
    for (index, k), value in np.ndenumerate(matrix):
        lane, entry = factor_place(index, k, size, inner)
        registers[entry * width // 32, lane] |= np.uint32(entry_bits(value, kind) << entry * width % 32)
    return registers


def multiply(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """A B + C as the emulator computes it. Shapes: a [M, K], b [K, M], c [M, M]."""
    size, _, kind = FORMS[name]
    num_results = size * size // 64
    addend = np.zeros((num_results, 64), np.uint32)
    for (i, j), value in np.ndenumerate(c):
        lane, register = result_place(i, j, size)
        addend[register, lane] = np.float32(value).view(np.uint32)
    first, second = factor_registers(a, kind), factor_registers(b.T, kind)
    instruction = MatrixCode(name, (RESULT, FIRST, SECOND, ADDEND), (num_results, len(first)))
    machine = Emulator(
        KernelCode("instructions", instruction.to_bytes() + ins.s_endpgm().to_bytes()), KernelLaunch()
    )
    for start, registers in ((FIRST, first), (SECOND, second), (ADDEND, addend)):
        for number, values in enumerate(registers):
            machine.registers.write32(start + number, values[None], EVERY_LANE)
    machine.run()
    result = np.zeros((size, size), np.float32)
    for i, j in np.ndindex(size, size):
        lane, register = result_place(i, j, size)
        result[i, j] = machine.registers.vector[RESULT + register, 0, lane].view(np.float32)
    return result


@pytest.mark.parametrize("name", FORMS)
def test_each_element_is_in_its_place(name):
    size, inner, _ = FORMS[name]
    rng = np.random.default_rng(1)
    # Up to 8 bits of mantissa are exact in all types, and so are sums of their products.
    a, b = (rng.integers(-127, 128, shape) for shape in ((size, inner), (inner, size)))
    c = rng.integers(-1000, 1000, (size, size))
    np.testing.assert_array_equal(multiply(name, a, b, c), a @ b + c)


@pytest.mark.parametrize("name", FORMS)
def test_each_k_meets_its_partner(name):
    """One k at a time, which a permutation of k within both factors would hide otherwise."""
    size, inner, _ = FORMS[name]
    for k in range(inner):
        a, b = np.zeros((size, inner)), np.zeros((inner, size))
        a[:, k], b[k] = np.arange(1, size + 1), np.arange(1, size + 1) * 2
        np.testing.assert_array_equal(multiply(name, a, b, np.zeros((size, size))), np.outer(a[:, k], b[k]))


@pytest.mark.parametrize("name", [name for name in FORMS if name.endswith("XF32")])
def test_xf32_keeps_ten_bits_of_mantissa(name):
    # Chosen so that rounding to nearest and cutting agree: the document leaves open which one it is.
    size, inner, _ = FORMS[name]
    a, b = np.zeros((size, inner)), np.zeros((inner, size))
    a[:, 0], b[0] = 1 + 2.0**-10 + 2.0**-13, 1.0
    assert (multiply(name, a, b, np.zeros((size, size))) == np.float32(1 + 2.0**-10)).all()


@pytest.mark.parametrize("name", [name for name in FORMS if name.endswith("_F32")])
def test_float32_keeps_all_bits(name):
    size, inner, _ = FORMS[name]
    a, b = np.zeros((size, inner)), np.zeros((inner, size))
    a[:, 0], b[0] = 1 + 2.0**-23, 1.0
    assert (multiply(name, a, b, np.zeros((size, size))) == np.float32(1 + 2.0**-23)).all()


def test_random_numbers_are_within_the_bound_of_any_order():
    """The document does not say in which order the sum is formed: the bound holds for all of them."""
    rng = np.random.default_rng(2)
    for name, (size, inner, kind) in FORMS.items():
        if name.endswith("XF32"):
            continue
        shapes = (size, inner), (inner, size)
        a, b = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        if kind != "f32":  # so that rounding the operands adds no error
            a, b = (np.round(x * 16) / 16 for x in (a, b))
        c = rng.standard_normal((size, size)).astype(np.float32)
        exact = a.astype(np.float64) @ b.astype(np.float64) + c
        bound = (inner + 1) * 2.0**-24 * (np.abs(a).astype(np.float64) @ np.abs(b) + np.abs(c))
        assert (np.abs(multiply(name, a, b, c) - exact) <= bound).all(), name
