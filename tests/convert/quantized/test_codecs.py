"""Codecs: values follow from the bit patterns by the formats' definitions, and rounding is to the nearest."""

import numpy as np
import pytest
from quantized_folders import by_hand, e2m1, e4m3

from zaya_jax.convert.quantized.codecs import CODECS, QuantizedValues, block_exponents, powers_of_two


def bits(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float32).view(np.uint32)


@pytest.mark.parametrize("name", CODECS)
def test_every_bit_pattern_has_its_value(name):
    values = np.arange(256, dtype=np.uint8).reshape(8, 32)
    if name == "fp8":
        values = values[values & 0x7F != 0x7F].reshape(-1, 127)  # without NaN
    if name == "int8":
        values = values.view(np.int8)
    groups = 2 if name == "mxfp4" else 1
    rng = np.random.default_rng(0)
    scales = rng.integers(1, 250, (len(values), groups)).astype(np.uint8)
    if name != "mxfp4":
        scales = rng.lognormal(size=(len(values), 1)).astype(np.float32)
    quantized = QuantizedValues(values, scales)
    # The product of a float32 and a number of few bits is rounded once: float64 holds it exactly.
    np.testing.assert_array_equal(bits(CODECS[name].decode(quantized)), bits(by_hand(name, quantized)))


def test_scales_of_one_byte_are_powers_of_two():
    scales = powers_of_two(np.arange(256, dtype=np.uint8))
    assert [float(each) for each in scales[:255]] == [2.0 ** (i - 127) for i in range(255)]
    assert np.isnan(scales[255])


def representable(name: str) -> np.ndarray:
    if name == "mxfp4":
        return np.array(sorted({e2m1(i) for i in range(16)}))
    if name == "int8":
        return np.arange(-127.0, 128.0)
    return np.array(sorted({e4m3(i) for i in range(256) if i & 0x7F != 0x7F}))


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_no_other_value_is_nearer(name, scale):
    rng = np.random.default_rng(1)
    matrix = (rng.standard_normal((5, 96)) * rng.lognormal(size=(5, 1)) * scale).astype(np.float32)
    quantized = CODECS[name].encode(matrix)
    factors = by_hand(name, QuantizedValues(np.full_like(quantized.values, 0x22 if name == "mxfp4" else 1),
                                            quantized.scales))  # fmt: skip
    one = {"mxfp4": 1.0, "int8": 1.0, "fp8": e4m3(1)}[name]
    units = matrix.astype(np.float64) / (factors / one)
    nearest = np.abs(units[..., None] - representable(name)).min(axis=-1)
    chosen = np.abs(units - by_hand(name, quantized) / (factors / one))
    # The quotient is rounded to float32 before the value is chosen, which may decide a tie.
    np.testing.assert_allclose(chosen, nearest, atol=2.0**-22 * np.abs(units).max())


@pytest.mark.parametrize("name", CODECS)
def test_rows_that_hurt(name):
    # The largest value times its scale may be an eighth more than the largest weight.
    tiny, huge = np.finfo(np.float32).tiny, np.finfo(np.float32).max / 2
    rows = [np.zeros(32), np.full(32, tiny / 4), np.full(32, huge), np.r_[huge, np.zeros(31)], -np.ones(32)]
    matrix = np.array(rows, np.float32)
    decoded = CODECS[name].decode(CODECS[name].encode(matrix))
    assert np.isfinite(decoded[:2]).all()
    np.testing.assert_array_equal(decoded[0], 0)
    # A power of two loses nothing in any format but int8, whose scale is 1 / 127.
    np.testing.assert_allclose(decoded[4], -1, rtol=0 if name != "int8" else 2e-7)
    np.testing.assert_allclose(decoded[2:4].max(), huge, rtol=2.0**-2)


def test_block_exponents_are_those_of_the_largest():
    largest = np.array([[1.0, 1.74, 1.75, 2.0, 3.5, 0.0]])
    np.testing.assert_array_equal(block_exponents(largest), [[-2, -2, -1, -1, 0, 0]])


@pytest.mark.parametrize("scale", [0.02, 3.0, 1e-6])
def test_mxfp4_is_that_of_compressed_tensors(scale):
    pytest.importorskip("compressed_tensors")
    import torch
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import generate_mx_scales, maybe_convert_from_mx_exp

    matrix = (np.random.default_rng(2).standard_normal((16, 128)) * scale).astype(np.float32)
    scheme = preset_name_to_scheme("MXFP4A16", ["Linear"])
    assert scheme.weights is not None
    exponents = generate_mx_scales(torch.from_numpy(np.abs(matrix.reshape(16, 4, 32)).max(axis=2)))
    scales = maybe_convert_from_mx_exp(scheme.weights, exponents)
    packer = BaseCompressor.get_value_from_registry("mxfp4-pack-quantized")
    theirs = packer.compress({"weight": torch.from_numpy(matrix), "weight_scale": scales}, scheme)
    ours = CODECS["mxfp4"].encode(matrix)
    np.testing.assert_array_equal(ours.scales, theirs["weight_scale"].numpy())
    # Negative numbers that round to zero keep their sign here, and lose it there.
    expected, actual = (CODECS["mxfp4"].unpack(x) for x in (theirs["weight_packed"].numpy(), ours.values))
    np.testing.assert_array_equal(actual, expected)
