"""Blockwise attention, compared with the specification in float64, and the network with either form."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from kernel_base import in_float64
from small_models import EXECUTION, SLIDING

import zaya_jax
from pallas_kernels.flash_attention import NO_WINDOW, flash_attention
from pallas_kernels.flash_attention.blockwise import block_of, blockwise_attention
from pallas_kernels.flash_attention.reference import flash_attention_reference


def operands(time, num_key_heads, seed=0):
    random = np.random.default_rng(seed)
    q, grad = random.standard_normal((2, 2, time, 4, 6))
    k, v = random.standard_normal((2, 2, time, num_key_heads, 6))
    return (3 * q, k, v), (grad, random.standard_normal((2, 4, time)))


@pytest.mark.parametrize(
    ("time", "block", "window", "num_segments"),
    [
        (12, 4, None, 1),
        (13, 4, None, 3),  # an odd length: the last block is padded
        (13, 4, 3, 1),  # blocks outside of the window
        (13, 4, 6, 3),
        (9, 4, 1, 1),  # a token sees only itself
        (5, 8, None, 2),  # a block longer than the sequence
        (1, 4, None, 1),
    ],
)
@pytest.mark.parametrize("num_key_heads", [1, 4])
def test_results_equal_the_specification(time, block, window, num_segments, num_key_heads):
    """Output, logsumexp and the gradients of both."""
    arguments, grads = operands(time, num_key_heads)
    segments = np.sort(np.random.default_rng(1).integers(0, num_segments, (2, time)), axis=1)
    segments = jnp.asarray(segments, jnp.int32)

    @jax.jit
    def ours(arguments, grads):
        attend = functools.partial(blockwise_attention, block=block)
        results, pull_back = jax.vjp(lambda *qkv: attend(*qkv, window, segments, segments), *arguments)
        return results, pull_back(grads)

    found = ours(*jax.tree.map(jnp.float32, (arguments, grads)))
    limits = jnp.int32([0, NO_WINDOW if window is None else window])
    reference = functools.partial(
        flash_attention_reference, limits=limits, query_segments_BT=segments, key_segments_BS=segments
    )
    expected = in_float64(reference, arguments, grads)
    for result, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    # Chunks of a sequence that devices share: after all keys, before all keys, and in between.
    ("time", "num_keys", "start", "window"),
    [(8, 8, 8, None), (8, 8, -8, None), (8, 8, 0, None), (5, 13, 8, None), (6, 11, 5, 6), (7, 20, 3, 2)],
)
def test_queries_may_be_anywhere_among_the_keys(time, num_keys, start, window):
    """Positions are data, because they differ between devices; compares both results and their gradients."""
    (q, _, _), grads = operands(time, 2)
    (_, k, v), _ = operands(num_keys, 2, seed=1)
    random = np.random.default_rng(2)
    of_queries, of_keys = (
        jnp.asarray(np.sort(random.integers(0, 2, (2, size)), axis=1), jnp.int32) for size in (time, num_keys)
    )

    @jax.jit
    def ours(arguments, grads, start):
        def attend(*qkv):
            return blockwise_attention(*qkv, window, of_queries, of_keys, query_start=start, block=4)

        results, pull_back = jax.vjp(attend, *arguments)
        return results, pull_back(grads)

    arguments = q, k, v
    found = ours(*jax.tree.map(jnp.float32, (arguments, grads)), start)
    reference = functools.partial(
        flash_attention_reference,
        limits=jnp.int32([start, NO_WINDOW if window is None else window]),
        query_segments_BT=of_queries,
        key_segments_BS=of_keys,
    )
    expected = in_float64(reference, arguments, grads)
    for result, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-5, atol=1e-5)


def test_a_query_without_visible_keys_gives_zeros_and_has_no_gradient():
    arguments, (grad, _) = operands(9, 2)
    of_queries, of_keys = jnp.ones((2, 9), jnp.int32).at[:, 5].set(7), jnp.ones((2, 9), jnp.int32)
    q, k, v, grad = map(jnp.float32, (*arguments, grad))
    (out, logsumexp), pull_back = jax.vjp(
        lambda *qkv: blockwise_attention(*qkv, None, of_queries, of_keys, block=4), q, k, v
    )
    assert not np.any(out[:, 5])
    assert np.all(np.isneginf(logsumexp[:, :, 5]))
    assert np.all(np.isfinite(logsumexp[:, :, :5]))
    of_blind = jnp.zeros_like(grad).at[:, 5].set(grad[:, 5])
    assert not any(np.any(x) for x in pull_back((of_blind, jnp.zeros_like(logsumexp))))


def test_a_window_may_be_data():
    """As in the scan over layers, where the window differs between layers."""
    q, k, v = jnp.asarray(np.random.default_rng(1).standard_normal((3, 1, 10, 2, 4)), jnp.float32)
    attend = jax.jit(lambda w: blockwise_attention(q, k, v, w, None, None, block=4)[0])
    for window in (2, 100):
        expected = flash_attention(q, k, v, window=window, implementation="full")[0]
        np.testing.assert_allclose(attend(jnp.int32(window)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("remat", [False, True])
def test_no_array_has_the_size_of_all_scores(remat):
    """Neither forward nor backward, nor when it is recomputed in a scan over layers; not even a mask."""
    time, heads, layers = 1024, 2, 3

    def layer(x, _):
        return x + blockwise_attention(x, x, x, None, None, None, block=64)[0], None

    def loss(x):
        return jax.lax.scan(jax.checkpoint(layer) if remat else layer, x, None, length=layers)[0].sum()

    x = jax.ShapeDtypeStruct((1, time, heads, 4), jnp.float32)
    memory = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < time * time


@pytest.mark.parametrize(("time", "block"), [(100, 256), (4096, 256), (40_000, 2048), (131_072, 2048)])
def test_block_sizes_suit_the_length(time, block):
    assert block_of(time) == block


def test_long_sequences_use_it():
    def num_scans(time, num_keys, **options):
        q, kv = (jax.ShapeDtypeStruct((1, size, 1, 4), jnp.float32) for size in (time, num_keys))
        attend = functools.partial(flash_attention, implementation="xla", **options)
        return str(jax.make_jaxpr(attend)(q, kv, kv)).count("scan[")

    assert (num_scans(1023, 1023), num_scans(1024, 1024)) == (0, 1)
    assert (num_scans(256, 4096, query_start=3840), num_scans(255, 2**20, query_start=0)) == (1, 0)


def test_a_chunk_of_a_long_sequence_has_no_array_of_all_its_scores():
    """A chunk of a sequence in 128 parts. Its position is data, so the program contains all pairs of
    blocks.
    """
    q, kv = (jax.ShapeDtypeStruct((1, size, 1, 4), jnp.float32) for size in (512, 2**16))

    def loss(q, k, v, start):
        return flash_attention(q, k, v, query_start=start, implementation="xla")[0].sum()

    program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, kv, kv, 0).compile()
    assert program.memory_analysis().temp_size_in_bytes < 512 * 2**16


def test_the_network_does_not_depend_on_the_form():
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 20), 0, SLIDING.vocab_size)
    segments_BT = jnp.asarray([[1] * 20, [1] * 7 + [2] * 9 + [0] * 4])
    variables = jax.jit(zaya_jax.Zaya(SLIDING).init)(jax.random.key(1), tokens_BT)
    logits = []
    for name in ("full", "blockwise"):
        execution = dataclasses.replace(EXECUTION, attention_implementation=name)
        model = zaya_jax.Zaya(SLIDING, execution)
        logits.append(jax.jit(model.apply)(variables, tokens_BT, segments_BT=segments_BT).logits_BTV)
    np.testing.assert_allclose(*logits, rtol=1e-5, atol=1e-5)
