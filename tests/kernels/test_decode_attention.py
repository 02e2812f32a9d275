"""`decode_attention` against its specification in float64. Lengths, padding and window are data."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_base import FORMS, ROUNDOFF, assert_close, fast_jit, in_turn, normals, rounded

from pallas_kernels.choice import choose
from pallas_kernels.decode_attention import Blocks, combine, decode_attention
from pallas_kernels.decode_attention.reference import decode_attention_reference, token_in_slot

BLOCKS = Blocks(slots=16, shares=3)
NO_WINDOW = np.iinfo(np.int32).max
SHAPES = [
    # B, S, N, K, H
    (2, 64, 4, 2, 16), (3, 33, 2, 2, 8), (1, 1, 1, 1, 16), (2, 47, 8, 1, 5),
    (1, 100, 20, 1, 64), (2, 16, 6, 2, 128), (2, 33, 4, 2, 64), (3, 48, 2, 2, 32),
]  # fmt: skip
"""Blocks that come out even, one more, one less; one slot; more query heads than a tile has rows. On CPUs the
scores of the last three are computed in place."""


def caches(batch, slots):
    """By name: lengths, first tokens, window."""
    random = np.random.default_rng(slots)
    full, none = np.full(batch, slots), np.zeros(batch, int)
    some, wrapped = random.integers(1, slots + 1, batch), random.integers(slots + 1, 4 * slots + 2, batch)
    found = {
        "full": (full, none, NO_WINDOW),
        "partly filled": (some, none, NO_WINDOW),
        "one token": (none + 1, none, NO_WINDOW),
        "padded": (some, random.integers(0, some), NO_WINDOW),
        "a window": (some, none, 5),
        "padded, a window": (full, full // 3, max(slots // 2, 1)),
        "a ring": (wrapped, none, NO_WINDOW),
        "a ring, a window": (wrapped, none, max(slots - 3, 1)),
        "a ring, still padded": (full + slots // 2, full - 1, NO_WINDOW),
        "nothing to see": (some, some, NO_WINDOW),
    }
    return {n: (np.int32(a), np.int32(b), np.int32(c)) for n, (a, b, c) in found.items()}


@functools.cache
def compiled(blocks=BLOCKS):
    def attend(q, k, v, lengths, first, window, *, implementation):
        return decode_attention(
            q, k, v, lengths, first_B=first, window=window, implementation=implementation, blocks=blocks
        )

    forms = [fast_jit(functools.partial(attend, implementation=name)) for name in FORMS]
    return *forms, fast_jit(decode_attention_reference)


def check(shape, dtype, blocks=BLOCKS):
    batch, slots, heads, key_heads, width = shape
    cache = (batch, slots, key_heads, width)
    low, exact = rounded(normals(slots, (batch, heads, width), cache, cache), dtype)
    *forms, reference = compiled(blocks)
    single = 8 * ROUNDOFF["float32"] * (12 + slots**0.5)
    # Probabilities and output are rounded.
    bounds = (single if dtype == "float32" else 2 * ROUNDOFF[dtype], single)
    for name, limits in caches(batch, slots).items():
        with jax.enable_x64(True):
            expected = [np.asarray(x) for x in reference(*exact, *limits)]
        seen = np.isfinite(expected[1])
        for ours in forms:
            out, logsumexp = ours(*low, *limits)
            assert out.dtype == dtype
            np.testing.assert_array_equal(np.isfinite(logsumexp), seen, err_msg=name)
            results = out, np.where(seen, logsumexp, 0)
            assert_close(results, (expected[0], np.where(seen, expected[1], 0)), bounds)


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_results(shape, dtype):
    check(shape, dtype)


@settings(derandomize=True, database=None, deadline=None, max_examples=4)
@given(
    batch=st.integers(1, 3),
    slots=st.integers(1, 90),
    group=st.integers(1, 5),
    key_heads=st.integers(1, 2),
    width=st.integers(1, 40),
    dtype=st.sampled_from(list(ROUNDOFF)),
    shares=st.integers(1, 9),
)
def test_any_shape(batch, slots, group, key_heads, width, dtype, shares):
    check((batch, slots, group * key_heads, key_heads, width), dtype, Blocks(slots=16, shares=shares))


def test_a_ring_is_what_was_written_into_it():
    slots, lengths = 5, np.arange(1, 14, dtype=np.int32)
    for length, tokens in zip(lengths, np.asarray(token_in_slot(jnp.asarray(lengths), slots)), strict=True):
        ring = np.full(slots, -1)
        for token in range(length):
            ring[token % slots] = token
        np.testing.assert_array_equal(np.where(tokens < 0, -1, tokens), ring)


def test_what_is_not_seen_may_hold_any_number():
    q, k, v = map(jnp.float32, normals(0, (2, 2, 8), (2, 40, 1, 8), (2, 40, 1, 8)))
    lengths, first, window = jnp.int32([20, 33]), jnp.int32([2, 0]), jnp.int32(16)
    hidden = jnp.arange(40)[None] >= lengths[:, None]
    other = [jnp.where(hidden[..., None, None], 1e30, x) for x in (k, v)]
    ours, *_ = compiled()
    for result, expected in zip(
        ours(q, k, v, lengths, first, window), ours(q, *other, lengths, first, window), strict=True
    ):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("implementation", FORMS)
@pytest.mark.parametrize(("num_slots", "width"), [(40, 64), (296, 16), (33, 16), (33, 64)])
def test_a_cache_may_be_part_of_an_array(implementation, num_slots, width):
    """On CPUs 40 slots are added in loops, 296 in a loop and a sum of 37 rows, 33 by a product; heads of 64
    channels have their scores in place.
    """
    dtype, tolerance = (jnp.bfloat16, 0.01) if num_slots == 40 else (jnp.float32, 1e-5)
    q, k, v = (jnp.asarray(x, dtype) for x in normals(num_slots, (2, 4, width), *[(2, 700, 2, width)] * 2))
    lengths = jnp.int32([num_slots - 3, num_slots // 2])
    attend = fast_jit(functools.partial(decode_attention, num_slots=num_slots, implementation=implementation))
    for first in (0, 700 - num_slots):
        part = slice(first, first + num_slots)
        limits = lengths, jnp.zeros_like(lengths), jnp.int32(NO_WINDOW)
        expected = decode_attention_reference(q, k[:, part], v[:, part], *limits)
        for ours, theirs in zip(attend(q, k, v, lengths, first_slot=first), expected, strict=True):
            np.testing.assert_allclose(jnp.float32(ours), theirs, rtol=tolerance, atol=tolerance)


def test_parts_of_a_cache_combine_to_the_whole():
    q, k, v = map(jnp.float32, normals(3, (1, 4, 8), (1, 30, 2, 8), (1, 30, 2, 8)))
    parts = [
        decode_attention(q, k[:, a:b], v[:, a:b], jnp.int32([b - a]), implementation="xla")
        for a, b in ((0, 11), (11, 30))
    ]
    nothing = jnp.zeros_like(parts[0][0]), jnp.full_like(parts[0][1], -jnp.inf)
    outs, logsumexps = (jnp.stack(x, axis=1) for x in zip(*parts, nothing, strict=True))
    whole = decode_attention(q, k, v, jnp.int32([30]), implementation="xla")
    for ours, expected in zip(combine(outs, logsumexps, axis=1), whole, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)
    blind = combine(outs[:, 2:], logsumexps[:, 2:], axis=1)
    assert not np.any(blind[0])
    assert np.all(np.isneginf(blind[1]))


def test_the_default_is_that_of_the_platform():
    q, k, v = map(jnp.bfloat16, normals(3, (1, 4, 8), (1, 30, 2, 8), (1, 30, 2, 8)))
    default, named = (
        decode_attention(q, k, v, jnp.int32([9]), implementation=name)
        for name in (None, choose("decode_attention", None))
    )
    jax.tree.map(np.testing.assert_array_equal, default, named)
    assert default[0].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q_BNH": jnp.zeros((1, 4))}, r"they must be \[B, N, H\]"),
        ({"q_BNH": jnp.zeros((2, 4, 8))}, "they must share the batch B and the head width H"),
        ({"q_BNH": jnp.zeros((1, 3, 8))}, "the number of query heads must be a multiple"),
        ({"q_BNH": jnp.zeros((1, 4, 8), jnp.bfloat16)}, "are bfloat16, float32, float32"),
        (
            {"lengths_B": jnp.zeros(2, jnp.int32)},
            r"lengths are int32 \(2,\); they must be int32 \[B\], \(1,\)",
        ),
        ({"first_B": jnp.zeros(1)}, r"first tokens are float32 \(1,\)"),
        ({"num_slots": 10}, "num_slots is 10; it must be between 0 and 9, the slots of the keys"),
        ({"num_slots": 4, "first_slot": 6}, "first_slot is 6; for 4 of the keys' 9 slots .* between 0 and 5"),
        ({"blocks": Blocks(slots=24)}, "slots is 24; a block's side must be a power of 2"),
        ({"blocks": Blocks(shares=0)}, "shares is 0; it must be at least 1"),
        ({"blocks": Blocks(slots=4096)}, "bytes of local memory, and a workgroup has 65,536"),
        ({"implementation": "fast"}, 'implementation is "fast"'),
    ],
)
def test_errors(change, sentence):
    values = {
        "q_BNH": jnp.zeros((1, 4, 8)),
        "k_BZKH": jnp.zeros((1, 9, 2, 8)),
        "v_BZKH": jnp.zeros((1, 9, 2, 8)),
        "lengths_B": jnp.ones(1, jnp.int32),
        "implementation": "pallas",
    }
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(decode_attention)(**(values | change))
