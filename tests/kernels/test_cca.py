"""`cca`, forward and backward, compared with its specification in float64.

Blocks are small, so that small shapes have several. Documents are data: one compiled case runs with several
of them.
"""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_base import (
    FORMS,
    ROUNDOFF,
    assert_close,
    assert_gradients_are_differences,
    fast_jit,
    in_turn,
    normals,
    rounded,
)

from pallas_kernels.cca import Blocks, CcaWeights, Tile, cca
from pallas_kernels.cca.reference import cca_reference
from pallas_kernels.choice import choose

SMALL = Tile(rows=16, contracted=16)
BLOCKS = Blocks(forward=SMALL, grad_mixed=SMALL, grad_latent=SMALL, grad_kernel=SMALL, run=32)
SHAPES = [
    # B, T, N, K, H, I, J, O
    (2, 19, 3, 1, 5, 3, 2, 1), (1, 33, 1, 1, 16, 1, 3, 8), (1, 1, 2, 2, 8, 2, 2, 4),
    (1, 37, 4, 2, 64, 2, 2, 16), (2, 16, 2, 1, 128, 2, 2, 32), (2, 7, 2, 1, 24, 1, 1, 0),
    (1, 18, 1, 1, 4, 18, 1, 2),
]  # fmt: skip
"""Odd lengths, one token, a block and a bit, padded widths, other taps, heads turned whole and not at all, a
tail longer than a block."""


def documents(batch, time):
    """Segments by name."""
    random = np.random.default_rng(time)
    sorted_ = np.sort(random.integers(1, 4, (batch, time)), axis=1)
    padded = sorted_.copy()
    padded[-1, time - time // 4 :] = 0
    left = np.ones((batch, time), int)
    left[0, : time // 3] = 0
    found = {
        "one": np.ones((batch, time), int),
        "several": sorted_,
        "padding after": padded,
        "padding before": left,
        "one that comes again": np.tile(np.arange(time) // 2 % 2 + 1, (batch, 1)),
        "one a token": np.tile(np.arange(1, time + 1), (batch, 1)),
        "nothing but padding": np.zeros((batch, time), int),
    }
    return {name: jnp.int32(x) for name, x in found.items()}


def operands(shape, seed=0):
    """Returns latent, tail and weights; cotangents of both results; the rotation."""
    batch, time, queries, keys, width, first, second, half = shape
    heads = queries + keys
    channels = heads * width
    latent, tail, kernel, bias, grouped, grouped_bias, temperature, grad_q, grad_k, angles = normals(
        seed + time,
        (batch, time, channels),
        (batch, first + second - 2, channels),
        (first, channels),
        (channels,),
        (heads, second, width, width),
        (channels,),
        (keys,),
        (batch, time, queries, width),
        (batch, time, keys, width),
        (batch, time, half),
    )
    # Temperatures on both sides of 0, but not near it, where the relative error of a gradient would mean
    # nothing.
    temperature = temperature + np.sign(temperature)
    weights = CcaWeights(kernel, bias, grouped * width**-0.5, grouped_bias, temperature)
    return (latent, tail, weights), (grad_q, grad_k), (np.cos(angles), np.sin(angles))


@functools.cache
def compiled():
    """Returns our form and the specification, with gradients of all differentiable arguments."""

    def both(function, arguments, cotangents, rotation, segments):
        results, pull_back = jax.vjp(lambda *first: function(*first, rotation, segments), *arguments)
        return results, pull_back(cotangents)

    def ours(*arguments, implementation):
        *arguments, segments = arguments
        return cca(*arguments, segments_BT=segments, implementation=implementation, blocks=BLOCKS)

    forms = [functools.partial(ours, implementation=name) for name in FORMS]
    return tuple(fast_jit(functools.partial(both, f)) for f in (*forms, cca_reference))


def arrays(shape, dtype, seed=0):
    """Returns the kernel's arguments, and the same values in float64: latent, tail, grouped kernel,
    cotangents.
    """
    (latent, tail, weights), grads, rotation = operands(shape, seed)
    (low, low_tail, grouped, grads), exact = rounded(
        (latent, tail, weights.grouped_kernel_AJHH, grads), dtype
    )
    weights, wide = rounded(weights._replace(grouped_kernel_AJHH=np.float64(0)), "float32")
    rotation, wide_rotation = rounded(rotation, "float32")
    weights = weights._replace(grouped_kernel_AJHH=grouped)
    wide = wide._replace(grouped_kernel_AJHH=exact[2])
    ours = (low, low_tail, weights), grads, rotation
    return ours, ((exact[0], exact[1], wide), exact[3], wide_rotation)


def bounds(shape, dtype, expected):
    """Bounds for the norm of each result: q, k; latent, tail, weights.

    float32: two dozen roundings of numbers that cancel by a factor below 8 in the norm, and sums of J*H
    channels and B*T tokens. bfloat16: queries and keys are rounded, and so are the inputs of the second
    convolution, or both kernels in one. Gradients round these again, the gradient of the mixed latent, and
    themselves; if a head is short, all its roundings weigh more, up to twice in the norm. The gradient of a
    temperature adds one number of about sqrt(H) per token, of either sign: its error is relative to their
    norm, not to that of the sum.
    """
    batch, time, _, keys, width, _, second, _ = shape
    single = 8 * ROUNDOFF["float32"] * (24 + (second * width) ** 0.5 + (batch * time) ** 0.5)
    result, gradient = (single, single) if dtype == "float32" else (2 * ROUNDOFF[dtype], 4 * ROUNDOFF[dtype])
    left = np.linalg.norm(expected[1][2].temperature_K)
    of_temperature = gradient * max(1, (batch * time * keys * width) ** 0.5 / left)
    weights = CcaWeights(*(gradient,) * 4, of_temperature)
    return (result, result), (gradient, gradient, weights)


def check(shape, dtype, names, *, seed=0):
    low, exact = arrays(shape, dtype, seed)
    *forms, reference = compiled()
    for name in names:
        segments = documents(*shape[:2])[name]
        with jax.enable_x64(True):
            expected = jax.tree.map(np.asarray, reference(*exact, segments))
        for ours in forms:
            results = ours(*low, segments)
            assert {x.dtype for x in jax.tree.leaves((results[0], results[1][:2]))} == {jnp.dtype(dtype)}
            assert_close(results, expected, bounds(shape, dtype, expected))


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_results_and_gradients(shape, dtype):
    check(shape, dtype, documents(*shape[:2]))


@settings(derandomize=True, database=None, deadline=None, max_examples=2)
@given(
    time=st.integers(1, 40),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    width=st.integers(3, 24),  # with a single channel, the remaining gradient is only rounding
    taps=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    rotated=st.floats(0, 1),
    dtype=st.sampled_from(list(ROUNDOFF)),
)
def test_any_shape(time, heads, width, taps, rotated, dtype):
    shape = (2, time, *heads, width, *taps, int(rotated * (width // 2)))
    check(shape, dtype, ["several", "padding before", "one that comes again"], seed=width)


def test_gradients_are_differences():
    """Without segments, because all tests above have them."""
    shape = (1, 9, 2, 1, 4, 2, 2, 1)
    arguments, cotangents, rotation = jax.tree.map(jnp.float32, operands(shape))

    def ours(*first):
        return cca(*first, rotation, implementation="pallas", blocks=BLOCKS)

    def reference(*first):
        return cca_reference(*first, rotation, None)

    assert_gradients_are_differences(ours, reference, arguments, cotangents, bound=1e-5)


def test_a_result_is_the_same_in_every_run():
    low, _ = arrays(SHAPES[0], "bfloat16")
    ours, *_ = compiled()
    segments = documents(*SHAPES[0][:2])["several"]
    jax.tree.map(np.testing.assert_array_equal, ours(*low, segments), ours(*low, segments))


def test_a_document_is_what_it_is_alone():
    """It does not depend on other documents, padding or the tail, whatever values they have."""
    shape = (2, 19, 3, 1, 5, 3, 2, 1)
    (arguments, _, rotation), _ = arrays(shape, "bfloat16")
    latent, tail, weights = arguments
    segments = jnp.int32(np.tile(np.repeat([1, 2, 0], [6, 8, 5]), (2, 1)))
    ours, *_ = compiled()
    cotangents = tuple(jnp.zeros((2, 19, n, 5), jnp.bfloat16) for n in (3, 1))
    other_latent = jnp.where((segments == 2)[:, :, None], latent, 7)
    first, second = (
        ours((some, some_tail, weights), cotangents, rotation, segments)[0]
        for some, some_tail in ((latent, tail), (other_latent, tail + 3))
    )
    for one, other in zip(first, second, strict=True):
        np.testing.assert_array_equal(one[:, 6:14], other[:, 6:14])
        assert np.any(one[:, :6] != other[:, :6])


@pytest.mark.parametrize("name", FORMS)
def test_what_stands_behind_the_latent_is_not_read(name):
    ((latent, tail, weights), cotangents, rotation), _ = arrays((2, 19, 4, 2, 8, 2, 2, 2), "float32")

    def both(latent):
        ours = functools.partial(cca, implementation=name, blocks=BLOCKS)
        results, pull_back = jax.vjp(lambda *first: ours(*first, rotation), latent, tail, weights)
        return results, pull_back(cotangents)

    behind = jnp.full((*latent.shape[:2], 5), jnp.nan)
    cut = fast_jit(both)(latent)
    results, (grad_latent, *others) = fast_jit(both)(jnp.concatenate([latent, behind], axis=2))
    assert not np.any(grad_latent[:, :, -5:])
    # XLA may add in another order in a second program for a GPU, but not on a CPU or in our kernels.
    tolerance = 1e-5 if name == "xla" and jax.default_backend() != "cpu" else 0
    equal = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(equal, cut, (results, (grad_latent[:, :, :-5], *others)))


def test_the_default_is_that_of_the_platform():
    ((latent, tail, weights), _, rotation), _ = arrays((1, 3, 2, 1, 4, 2, 2, 1), "bfloat16")
    default, named = (
        cca(latent, tail, weights, rotation, implementation=name) for name in (None, choose("cca", None))
    )
    jax.tree.map(np.testing.assert_array_equal, default, named)
    assert [x.dtype for x in default] == [jnp.bfloat16] * 2


@pytest.mark.parametrize(("batch", "time"), [(0, 3), (2, 0)])
def test_no_tokens(batch, time):
    ((latent, tail, weights), grads, rotation), _ = arrays((batch, time, 2, 1, 4, 2, 2, 1), "float32")
    results, pull_back = jax.vjp(
        lambda *first: cca(*first, rotation, implementation="pallas", blocks=BLOCKS), latent, tail, weights
    )
    assert [x.shape for x in results] == [(batch, time, 2, 4), (batch, time, 1, 4)]
    assert not any(np.any(x) for x in jax.tree.leaves(pull_back(grads)))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"latent_BTX": (1, 4)}, r"the latent is float32 \(1, 4\); it must be \[B, T, X\]"),
        ({"latent_BTX": (1, 4, 9)}, r"with A\*H = C at most the latent's 9 channels"),
        ({"tail_BWC": (1, 1, 24)}, r"the tail is float32 \(1, 1, 24\); .* must be float32 \(1, 2, 24\)"),
        ({"depthwise_bias_C": (8,)}, r"depthwise_bias_C is \(8,\); with this latent it must be \(24,\)"),
        ({"temperature_K": (2,)}, "there are 3 heads and 2 temperatures"),
        ({"cos": (1, 3, 2)}, r"cosines are \(1, 3, 2\), sines \(1, 4, 2\)"),
        ({"cos": (1, 4, 5), "sin": (1, 4, 5)}, "5 pairs of channels are rotated; a head has 8 channels"),
        ({"segments_BT": (1, 5)}, r"segments are \(1, 5\); with this latent they must be \(1, 4\)"),
        ({"blocks": dataclasses.replace(BLOCKS, forward=Tile(rows=8, contracted=16))},
         "forward.rows is 8; a block's side must be a power of 2, at least 16"),
        ({"blocks": dataclasses.replace(BLOCKS, grad_latent=Tile(rows=1024, contracted=64))},
         "of local memory, and a workgroup has 65,536"),
        ({"blocks": dataclasses.replace(BLOCKS, run=24)}, "run is 24; it must be a multiple of 16 rows"),
        ({"depthwise_kernel_IC": (7, 24), "grouped_kernel_AJHH": (3, 6, 8, 8), "tail_BWC": (1, 11, 24)},
         "with 7 and 6 taps there are 37 paths through both convolutions; the kernels support 31"),
        ({"implementation": "fast"}, 'implementation is "fast"'),
    ],
)  # fmt: skip
def test_errors(change, sentence):
    values = {
        "latent_BTX": (1, 4, 24),
        "tail_BWC": (1, 2, 24),
        "depthwise_kernel_IC": (2, 24),
        "depthwise_bias_C": (24,),
        "grouped_kernel_AJHH": (3, 2, 8, 8),
        "grouped_bias_C": (24,),
        "temperature_K": (1,),
        "cos": (1, 4, 2),
        "sin": (1, 4, 2),
        "implementation": "pallas",
    }
    arrays = {
        name: jnp.zeros(value, jnp.int32 if "segments" in name else jnp.float32)
        if isinstance(value, tuple)
        else value
        for name, value in (values | change).items()
    }
    weights = CcaWeights(*(arrays.pop(name) for name in CcaWeights._fields))
    rotation = arrays.pop("cos"), arrays.pop("sin")
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(cca)(weights=weights, rotation=rotation, **arrays)


def test_wrong_dtypes():
    (arguments, _, rotation), _ = arrays((1, 3, 2, 1, 4, 2, 2, 1), "float32")
    latent, tail, weights = arguments
    with pytest.raises(ValueError, match="the latent is float16"):
        cca(latent.astype(jnp.float16), tail, weights, rotation)
    with pytest.raises(ValueError, match="the tail is bfloat16"):
        cca(latent, tail.astype(jnp.bfloat16), weights, rotation)
