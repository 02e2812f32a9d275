"""The decoding cache: attention through it, compared with plain attention to all tokens in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import SLIDING

from zaya_jax.config import ExecutionConfig, ModelConfig
from zaya_jax.model.cache import attend_through_cache, holdings, init_cache, layer_slots
from zaya_jax.model.weights import abstract_variables
from zaya_jax.model.zaya import Zaya

WINDOW, TIME = 5, 20
STORED = {"bfloat16": "uint16"}
"""Types in which a pool has its numbers, by their type; the same type if not listed."""
CONFIG = dataclasses.replace(SLIDING, sliding_window=WINDOW)
PADDING = np.array([0, 3])
"""Of each row, on the left."""


def plain_attention(q_TNH, k_TKH, v_TKH, *, window, padding):
    """Returns plain attention of one row; queries of its padding have no result."""
    group = q_TNH.shape[1] // k_TKH.shape[1]
    out_TNH = np.full(q_TNH.shape, np.nan)
    for time, head in np.ndindex(q_TNH.shape[:2]):
        seen = slice(max(padding, time - window + 1), time + 1)
        if time >= padding:
            scores_S = k_TKH[seen, head // group] @ q_TNH[time, head] / np.sqrt(q_TNH.shape[2])
            probs_S = np.exp(scores_S - scores_S.max())
            out_TNH[time, head] = probs_S / probs_S.sum() @ v_TKH[seen, head // group]
    return out_TNH


@functools.partial(jax.jit, static_argnames="chunks")
def attend_in_chunks(q_LBTNH, k_LBTKH, v_LBTKH, *, chunks):
    """Processes a chunk in all layers before the next chunk, because layers write to one pool."""
    cache = dataclasses.replace(init_cache(CONFIG, 2, TIME, "float32"), first_B=jnp.asarray(PADDING))
    slots = layer_slots(CONFIG, TIME)
    outputs, start = [], 0
    for length in chunks:
        now, out_LBTNH = slice(start, start + length), []
        segments_BT = jnp.asarray(np.arange(length) >= PADDING[:, None], jnp.int32) if start == 0 else None
        pool = cache.pool
        for layer in range(3):
            chunk = (x[layer, :, now] for x in (q_LBTNH, k_LBTKH, v_LBTKH))
            own_slots = jax.tree.map(lambda x, layer=layer: x[layer], slots)
            where = pool, own_slots, cache
            out_BTNH, pool = attend_through_cache(CONFIG, ExecutionConfig(), *chunk, *where, segments_BT)
            out_LBTNH.append(out_BTNH)
        start += length
        cache = dataclasses.replace(cache, pool=pool, length=jnp.asarray(start), empty=False)
        outputs.append(jnp.stack(out_LBTNH))
    return jnp.concatenate(outputs, axis=2)


@pytest.mark.parametrize("chunks", [(20,), (4, 3, 8, 1, 1, 3), (7, 5, 1, 2, 5)], ids=str)
def test_chunks_attend_to_all_previous_tokens(chunks):
    """Chunks shorter than the window, equal to it and longer, in a ring that has wrapped; rows are padded."""
    random = np.random.default_rng(0)
    q_LBTNH = 2 * random.standard_normal((3, 2, TIME, 4, 8))
    k_LBTKH, v_LBTKH = random.standard_normal((2, 3, 2, TIME, 2, 8))
    actual = attend_in_chunks(
        *(jnp.asarray(x, jnp.float32) for x in (q_LBTNH, k_LBTKH, v_LBTKH)), chunks=chunks
    )
    for layer, row in np.ndindex(3, 2):
        expected_TNH = plain_attention(
            *(x[layer, row] for x in (q_LBTNH, k_LBTKH, v_LBTKH)),
            window=TIME if layer == 1 else WINDOW,
            padding=PADDING[row],
        )
        real = slice(PADDING[row], None)
        np.testing.assert_allclose(actual[layer, row, real], expected_TNH[real], rtol=1e-5, atol=1e-5)


def test_slots_by_hand():
    """A ring is no longer than the text: a wide window reserves no slots that are never written."""
    assert [held.size for held in holdings(CONFIG, 20)] == [5, 20, 5]
    assert [held.size for held in holdings(CONFIG, 3)] == [3, 3, 3]
    assert holdings(CONFIG, 20, ranks=3) == ((5, False), (7, True), (5, False))
    assert init_cache(CONFIG, 2, 20).pool[0].shape == (2, 30, 2, 8)
    slots = layer_slots(CONFIG, 20)
    np.testing.assert_array_equal(slots.first, [0, 5, 25])
    np.testing.assert_array_equal(slots.window, [5, 20, 5])


@pytest.mark.parametrize(
    ("of_network", "requested", "chunks", "expected"),
    [
        ("float32", None, (6,), "float32"),
        ("float32", None, (1, 1), "float32"),
        ("bfloat16", None, (4, 2), "bfloat16"),
        ("float32", "bfloat16", (4, 2), "bfloat16"),
        ("bfloat16", "float32", (1, 1), "float32"),
    ],
)
def test_a_cache_has_the_dtype_of_the_network(of_network, requested, chunks, expected):
    model = Zaya(CONFIG, ExecutionConfig(dtype=of_network))
    cache = init_cache(CONFIG, 1, 6, requested)
    variables = abstract_variables(CONFIG)
    for size in chunks:
        tokens = jax.ShapeDtypeStruct((1, size), jnp.int32)
        cache = jax.eval_shape(lambda v, t, c: model.apply(v, t, cache=c), variables, tokens, cache).cache
    assert cache.dtype == jnp.dtype(expected)
    assert {leaf.dtype for leaf in cache.pool} == {jnp.dtype(STORED.get(expected, expected))}


def test_a_token_is_written_without_a_float32_copy_of_the_pool():
    """XLA of jax 0.10 would convert all keys and values on a CPU, for each layer of each token."""
    model = Zaya(CONFIG)
    cache = init_cache(CONFIG, 2, 100)
    tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
    step = jax.jit(lambda v, t, c: model.apply(v, t, cache=c).cache, donate_argnums=2, keep_unused=True)
    compiled = step.lower(abstract_variables(CONFIG), tokens, cache).compile().as_text()
    sizes = ",".join(map(str, cache.pool[0].shape))
    assert f"u16[{sizes}]" in compiled
    assert f"f32[{sizes}]" not in compiled


def test_a_float32_network_has_the_same_logits_with_and_without_a_cache():
    """Up to float32 rounding; a bfloat16 cache would round its keys to three digits."""
    model = Zaya(CONFIG, ExecutionConfig(dtype="float32"))

    @jax.jit
    def last_logits(key):
        tokens = jax.random.randint(key, (2, 7), 0, CONFIG.vocab_size)
        variables = model.init(key, tokens)
        first = model.apply(variables, tokens[:, :6], cache=init_cache(CONFIG, 2, 7))
        second = model.apply(variables, tokens[:, 6:], cache=first.cache)
        return model.apply(variables, tokens).logits_BTV[:, -1], second.logits_BTV[:, 0]

    whole, through_cache = last_logits(jax.random.key(0))
    np.testing.assert_allclose(through_cache, whole, rtol=1e-5, atol=1e-5)


def test_types_of_an_empty_cache():
    """Keys and values have the requested type, else the model's; the state of CCA is float32."""
    assert Zaya(CONFIG).execution.dtype == "bfloat16"
    for requested, dtype in (((), jnp.bfloat16), (("float32",), jnp.float32)):
        cache = init_cache(CONFIG, 1, 4, *requested)
        assert cache.dtype == jnp.dtype(dtype)
        assert {leaf.dtype for leaf in jax.tree.leaves(cache.state)} == {jnp.dtype("float32")}


def test_a_cache_that_is_too_short_is_an_error():
    with pytest.raises(ValueError, match="max_length is 0; the cache must hold at least 1 token"):
        init_cache(CONFIG, 1, 0)


def test_the_cache_of_zaya1_is_an_eighth_of_multi_head_attentions():
    config = ModelConfig()
    cache = jax.eval_shape(lambda: init_cache(config, 1, 1024, "bfloat16"))
    pool, state = (
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(part)) for part in (cache.pool, cache.state)
    )
    assert 8 * pool == 1024 * 40 * 2 * config.hidden_size * 2  # keys and values of 40 layers in bfloat16
    # Of each layer the convolutions' last two inputs of 1,280 channels and 128 delayed values, in float32.
    assert state == 40 * 4 * (2 * 1280 + 128)
