"""`flash_attention`, forward and backward, compared with its specification in float64.

Blocks are small, so that small shapes have many. Masks are data: one compiled case runs with several of them.
"""

import functools
import heapq
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

from pallas_kernels.choice import choose
from pallas_kernels.flash_attention import BLOCKS as BLOCKS_BY_WIDTH
from pallas_kernels.flash_attention import NO_WINDOW, Blocks, Tile, flash_attention, triton
from pallas_kernels.flash_attention.reference import flash_attention_reference, visible_keys
from pallas_kernels.flash_attention.spans import block_spans

SMALL = Tile(queries=16, keys=16)
BLOCKS = Blocks(forward=SMALL, grad_queries=SMALL, grad_keys=SMALL)
OBLONG = Blocks(
    forward=Tile(queries=32, keys=16),
    grad_queries=Tile(queries=16, keys=32),
    grad_keys=Tile(queries=32, keys=16),
)
SHAPES = [
    # B, T, S, N, K, H
    (1, 33, 33, 2, 1, 16), (2, 48, 48, 4, 2, 8), (1, 15, 64, 2, 2, 16), (1, 17, 40, 8, 2, 5),
    (1, 47, 49, 2, 1, 128), (1, 20, 20, 1, 1, 256), (1, 1, 1, 1, 1, 64),
]  # fmt: skip
"""Odd lengths, one token, one block more or less, fewer queries than keys, padded head widths."""


def documents(random, batch, size):
    """Sorted document numbers, with padding (0) at the end of the last row."""
    segments = np.sort(random.integers(1, 4, (batch, size)), axis=1).astype(np.int32)
    segments[-1, size - size // 4 :] = 0
    return segments


def maskings(batch, queries, keys):
    """By name: limits, and segments of queries and of keys."""
    random = np.random.default_rng(queries)
    start = keys - queries
    of_keys = documents(random, batch, keys)
    one = np.ones((batch, keys), np.int32)
    alone = np.tile(np.arange(keys, dtype=np.int32), (batch, 1))
    unsorted = random.integers(0, 3, (batch, keys)).astype(np.int32)
    cases = {
        "plain": (NO_WINDOW, one),
        "window": (max(keys // 3, 1), one),
        "window of one": (1, one),
        "documents": (NO_WINDOW, of_keys),
        "window and documents": (7, of_keys),
        "a document a token": (NO_WINDOW, alone),
        "unsorted documents": (NO_WINDOW, unsorted),
    }
    found = {name: (np.int32([start, w]), s[:, start:], s) for name, (w, s) in cases.items()}
    blind = np.full((batch, queries), 9, np.int32)
    return found | {"blind": (np.int32([start, NO_WINDOW]), blind, one)}


def operands(shape):
    batch, queries, keys, heads, key_heads, width = shape
    q, k = (batch, queries, heads, width), (batch, keys, key_heads, width)
    return normals(queries, q, k, k), normals(keys + 1, q, (batch, heads, queries))


@functools.cache
def compiled(segmented, blocks):
    """Returns our forms by name and the reference, with gradients of q, k and v for both results."""

    def both(function, arguments, cotangents, masking):
        results, pull_back = jax.vjp(lambda *qkv: function(*qkv, masking), *arguments)
        return results, pull_back(cotangents)

    def ours(q, k, v, masking, *, implementation):
        limits, *segments = masking
        options = (
            dict(zip(("query_segments_BT", "key_segments_BS"), segments, strict=True)) if segmented else {}
        )
        return flash_attention(
            q,
            k,
            v,
            query_start=limits[0],
            window=limits[1],
            implementation=implementation,
            blocks=blocks,
            **options,
        )

    def reference(q, k, v, masking):
        return flash_attention_reference(q, k, v, *(masking if segmented else (masking[0], None, None)))

    forms = {name: functools.partial(ours, implementation=name) for name in FORMS}
    return tuple(fast_jit(functools.partial(both, f)) for f in (*forms.values(), reference))


def bounds(masking, shape, dtype):
    """Bounds for the norm of each result: output, logsumexp; q, k, v.

    float32: a dozen roundings of numbers of the size of the scores, which stay below 8 here, and sums of S
    terms. bfloat16: the output rounds the probabilities and itself; the gradients round probabilities, their
    gradients and the results, and lose as much again where two of them cancel. The cotangent of the logsumexp
    keeps the gradients of q and k from vanishing.
    """
    single = 8 * ROUNDOFF["float32"] * (12 + shape[2] ** 0.5)
    if dtype == "float32":
        return (single, single), (single,) * 3
    half = ROUNDOFF[dtype]
    return (2 * half, single), (4 * half, 4 * half, 3 * half)


def check(shape, dtype, names, *, segmented, blocks=BLOCKS):
    arguments, cotangents = operands(shape)
    low, exact = rounded(arguments, dtype)
    grad, grad_exact = rounded(cotangents[0], dtype)
    *forms, reference = compiled(segmented, blocks)
    for name in names:
        masking = maskings(*shape[:3])[name]
        with jax.enable_x64(True):
            wide = (grad_exact, np.float64(np.float32(cotangents[1])))
            expected = jax.tree.map(np.asarray, reference(tuple(exact), wide, masking))
        seen = np.isfinite(expected[0][1])
        for ours in forms:
            results = ours(low, (grad, jnp.float32(cotangents[1])), masking)
            assert results[0][0].dtype == results[1][0].dtype == dtype
            np.testing.assert_array_equal(np.isfinite(results[0][1]), seen, err_msg=name)
            pair = ((((r[0][0], np.where(seen, r[0][1], 0)), r[1])) for r in (results, expected))
            assert_close(*pair, bounds(masking, shape, dtype))


PLAIN = ("plain", "window", "window of one")
SEGMENTED = ("documents", "window and documents", "a document a token", "unsorted documents", "blind")


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES))
def test_one_document(shape, dtype):
    check(shape, dtype, PLAIN, segmented=False)


@pytest.mark.parametrize(("shape", "dtype"), in_turn(SHAPES[:5]))
def test_documents(shape, dtype):
    check(shape, dtype, SEGMENTED, segmented=True, blocks=OBLONG)


@settings(derandomize=True, database=None, deadline=None, max_examples=4)
@given(
    queries=st.integers(1, 40),
    before=st.integers(0, 30),
    heads=st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)]),
    width=st.integers(1, 32),
    dtype=st.sampled_from(list(ROUNDOFF)),
)
def test_any_shape(queries, before, heads, width, dtype):
    check((1, queries, queries + before, *heads, width), dtype, SEGMENTED, segmented=True)


def test_gradients_are_differences():
    shape = (1, 18, 18, 2, 1, 4)
    arguments, cotangents = jax.tree.map(jnp.float32, operands(shape))
    limits = jnp.asarray(maskings(*shape[:3])["window"][0])
    ours = functools.partial(
        flash_attention, window=int(limits[1]), query_start=0, implementation="pallas", blocks=BLOCKS
    )
    reference = functools.partial(
        flash_attention_reference, limits=limits, query_segments_BT=None, key_segments_BS=None
    )
    assert_gradients_are_differences(ours, reference, tuple(arguments), tuple(cotangents), bound=1e-5)


@pytest.mark.parametrize("name", [*PLAIN, *SEGMENTED])
@pytest.mark.parametrize(
    ("queries", "keys", "blocks"), [(33, 33, (16, 16)), (40, 70, (8, 32)), (64, 64, (32, 8))]
)
def test_spans_contain_all_visible_blocks_and_only_whole_blocks_skip_the_mask(queries, keys, blocks, name):
    masking = tuple(map(jnp.asarray, maskings(2, queries, keys)[name]))
    seen = np.broadcast_to(visible_keys(queries, keys, *masking), (2, queries, keys))
    of_queries, of_keys = block_spans(queries, keys, *blocks, *masking)
    pad = [(0, 0), (0, -queries % blocks[0]), (0, -keys % blocks[1])]
    tiles = np.pad(seen, pad).reshape(
        2, -(-queries // blocks[0]), blocks[0], -(-keys // blocks[1]), blocks[1]
    )
    there = np.pad(np.ones_like(seen), pad).reshape(tiles.shape)
    some = tiles.any(axis=(2, 4))
    every = (tiles | ~there).all(axis=(2, 4)) & there[:, :, :1].all(axis=(2, 4))
    for spans, seen, whole_seen in ((of_queries, some, every), (of_keys, some.mT, every.mT)):
        first, whole, edge, end = (np.asarray(spans[..., i])[..., None] for i in range(4))
        index = np.arange(seen.shape[2])
        assert np.all(first <= whole), "the walk takes the blocks before the whole ones from here"
        assert np.all((whole <= edge) & (edge <= end))
        assert not np.any(seen & ~((index >= first) & (index < end)))
        assert not np.any(((index >= whole) & (index < edge)) & ~whole_seen)
        if name != "unsorted documents":  # then visible blocks are contiguous, and no others are visited
            exact = ~seen.any(axis=2) | (np.asarray(end - first)[..., 0] == seen.sum(axis=2))
            # The last row may have padding, 0, after its documents: a block with both counts as containing
            # all.
            assert np.all(exact[0])


def test_the_whole_blocks_of_a_causal_mask_need_no_mask():
    of_queries, of_keys = block_spans(64, 64, 16, 16, jnp.int32([0, NO_WINDOW]), None, None)
    np.testing.assert_array_equal(of_queries[0], [[0, 1, 1, 1], [0, 0, 1, 2], [0, 0, 2, 3], [0, 0, 3, 4]])
    np.testing.assert_array_equal(of_keys[0], [[0, 1, 4, 4], [1, 2, 4, 4], [2, 3, 4, 4], [3, 4, 4, 4]])


@pytest.mark.parametrize("broken", range(4))
def test_a_nan_propagates(broken):
    """From queries, keys, values or the gradient: rounding to bfloat16 must not hide it."""
    arguments, cotangents = operands((1, 20, 20, 2, 1, 16))
    *arguments, grad = (jnp.asarray(x, jnp.bfloat16) for x in (*arguments, cotangents[0]))
    limits = jnp.int32([0, NO_WINDOW])
    both = compiled(False, BLOCKS)[FORMS.index("pallas")]

    def place(x, number):
        return x.at[0, 3, 0, 1].set(jnp.nan) if number == broken else x

    arguments = tuple(place(x, number) for number, x in enumerate(arguments))
    (out, _), gradients = both(arguments, (place(grad, 3), jnp.float32(cotangents[1])), (limits, None, None))
    assert broken == 3 or np.any(np.isnan(out))
    q, k, v = (np.any(np.isnan(x)) for x in gradients)
    assert q
    assert k
    assert v or broken == 2, "their own gradient alone does not depend on the values"


def launches(batch, time, heads, key_heads):
    """Returns the grids by kernel, of a call and its gradients."""
    queries, keys = (batch, time, heads, 128), (batch, time, key_heads, 128)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in (queries, keys, keys)]

    def both(*arguments):
        results, pull_back = jax.vjp(functools.partial(flash_attention, implementation="pallas"), *arguments)
        return pull_back(results)

    def record(*operands, grid, name, **options):
        grids[name] = grid
        return launch(*operands, grid=grid, name=name, **options)

    grids, launch = {}, triton.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "launch", record)
        jax.eval_shape(both, *arguments)
    return grids


def longest_wait(lengths, places):
    """Returns the end of the last program relative to a perfect distribution: each unit takes the next
    program.
    """
    ends = [0] * places
    for length in lengths:
        heapq.heapreplace(ends, ends[0] + length)
    return max(ends) / (sum(lengths) / places)


@pytest.mark.parametrize(
    ("name", "bound"),
    [("flash_attention", 1.16), ("flash_attention_grad_queries", 1.16), ("flash_attention_grad_keys", 1.07)],
)
def test_a_causal_sequence_uses_all_of_an_mi300x(name, bound):
    """304 compute units hold two programs each. For queries, the longest one takes a seventh more than a
    share.
    """
    batch, time = 4, 4096
    grid = launches(batch, time, 8, 2)[name]
    tile = getattr(BLOCKS_BY_WIDTH[128], name.removeprefix("flash_attention").lstrip("_") or "forward")
    spans = block_spans(time, time, tile.queries, tile.keys, jnp.int32([0, NO_WINDOW]), None, None)[
        name.endswith("keys")
    ][0]
    visited = np.asarray(spans[:, 3] - spans[:, 0])
    longest_first = visited if name.endswith("keys") else visited[::-1]
    assert grid == (8, batch, len(visited))  # the first number moves first
    assert np.all(np.diff(longest_first) <= 0)
    assert longest_wait(np.repeat(longest_first, 8 * batch).tolist(), 2 * 304) <= bound


def test_the_default_is_that_of_the_platform():
    arguments = tuple(jnp.float32(x) for x in operands((1, 5, 5, 2, 1, 4))[0])
    jax.tree.map(
        np.testing.assert_array_equal,
        flash_attention(*arguments),
        flash_attention(*arguments, implementation=choose("flash_attention", None)),
    )


def test_no_keys_and_no_queries():
    for shape in ((1, 3, 0, 1, 1, 8), (1, 0, 3, 1, 1, 8), (0, 3, 3, 1, 1, 8)):
        arguments = tuple(jnp.float32(x) for x in operands(shape)[0])
        attend = functools.partial(flash_attention, implementation="pallas", blocks=BLOCKS)
        (out, logsumexp), pull_back = jax.vjp(attend, *arguments)
        assert not np.any(out)
        assert np.all(np.isneginf(logsumexp))
        assert not any(np.any(g) for g in pull_back((out, jnp.zeros_like(logsumexp))))
        with pytest.raises(ValueError, match='implementation is "fast"'):
            flash_attention(*arguments, implementation="fast")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k_BSKH": (1, 4, 1, 8, 1)}, r"they must be \[B, T, N, H\]"),
        ({"v_BSKH": (1, 5, 2, 8)}, r"they must be \[B, T, N, H\]"),
        ({"q_BTNH": (2, 4, 4, 8)}, "they must share the batch B and the head width H"),
        ({"q_BTNH": (1, 4, 3, 8)}, "the number of query heads must be a multiple of that of key heads"),
        ({"query_segments_BT": (1, 4)}, "only one of query_segments_BT and key_segments_BS was given"),
        (
            {"query_segments_BT": (1, 4), "key_segments_BS": (1, 5)},
            r"segments are \(1, 4\) and \(1, 5\); .* must be \(1, 4\) and \(1, 4\)",
        ),
        ({"blocks": Blocks(forward=Tile(queries=8, keys=16), grad_queries=SMALL, grad_keys=SMALL)},
         "forward.queries is 8; a block's side must be a power of 2, at least 16"),
        ({"blocks": Blocks(forward=SMALL, grad_queries=Tile(queries=64, keys=4096), grad_keys=SMALL)},
         "needs 262,144 bytes of local memory, and a workgroup has 65,536"),
        (dict.fromkeys(("q_BTNH", "k_BSKH", "v_BSKH"), (1, 4, 2, 300)), "heads are 300 wide"),
        ({"implementation": "fast"}, 'implementation is "fast"'),
    ],
)  # fmt: skip
def test_errors(change, sentence):
    shapes = {
        "q_BTNH": (1, 4, 4, 8),
        "k_BSKH": (1, 4, 2, 8),
        "v_BSKH": (1, 4, 2, 8),
        "implementation": "pallas",
    }
    values = {
        name: jnp.zeros(value, jnp.int32 if "segments" in name else jnp.float32)
        if isinstance(value, tuple)
        else value
        for name, value in (shapes | change).items()
    }
    with pytest.raises(ValueError, match=sentence):
        inspect.unwrap(flash_attention)(**values)


def test_dtypes_must_agree():
    q, k = jnp.zeros((1, 4, 2, 8)), jnp.zeros((1, 4, 2, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="queries, keys and values are float32, bfloat16, float32"):
        flash_attention(q, k, q)
