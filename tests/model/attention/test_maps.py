"""Attention maps agree with the attention that the model computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EXECUTION, SLIDING

import zaya_jax
from zaya_jax.model.attention.block import attend_within
from zaya_jax.model.weights import declare, initialize
from zaya_jax.model.zaya import Zaya, initial_router_bias, residual_stream

MODEL = Zaya(SLIDING, EXECUTION)
LENGTH, TIME = 8, 16
"""Of a packed document, of which there are two, and of the row."""


@functools.cache
def variables():
    params = jax.jit(lambda: initialize(declare(SLIDING), jax.random.key(0)))()
    return {"params": params, "router_bias": {"layers": initial_router_bias(SLIDING)}}


def packed():
    tokens_BT = np.random.default_rng(0).integers(1, SLIDING.vocab_size, (1, TIME)).astype(np.int32)
    places_BT = np.arange(TIME, dtype=np.int32)[None]
    return tokens_BT, places_BT % LENGTH, 1 + places_BT // LENGTH


@functools.cache
def packed_maps():
    return np.asarray(zaya_jax.attention_maps(MODEL, variables(), *packed()))


def test_rows_are_shares_over_visible_tokens():
    maps_LBNTS = packed_maps()
    assert maps_LBNTS.shape == (3, 1, SLIDING.num_attention_heads, TIME, TIME)
    np.testing.assert_allclose(maps_LBNTS.sum(axis=-1), 1, atol=1e-6)
    segments_T, places_T = packed()[2][0], np.arange(TIME)
    for kind, map_NTS in zip(SLIDING.layer_types, maps_LBNTS[:, 0], strict=True):
        distance_TS = places_T[:, None] - places_T
        reach = SLIDING.sliding_window if kind == "hybrid_sliding" else TIME
        seen_TS = (distance_TS >= 0) & (distance_TS < reach) & (segments_T[:, None] == segments_T)
        np.testing.assert_array_equal(map_NTS > 0, np.broadcast_to(seen_TS, map_NTS.shape))


def test_a_packed_document_has_its_own_maps_in_the_requested_layers():
    for begin in (0, LENGTH):
        inside, chosen = slice(begin, begin + LENGTH), (2, 0)
        alone = zaya_jax.attention_maps(MODEL, variables(), packed()[0][:, inside], layers=chosen)
        np.testing.assert_allclose(packed_maps()[[*chosen], :, :, inside, inside], alone, atol=1e-5)


@jax.jit
def attended(params, bias_LX, tokens_BT, positions_BT, segments_BT):
    """Returns the attention outputs of each layer, and its values."""
    inputs = tokens_BT, positions_BT, segments_BT
    kept = residual_stream(SLIDING, EXECUTION, params, bias_LX, *inputs, keep_operands=True).operands
    layers = [jax.tree.map(lambda x, i=i: x[i], kept) for i in range(SLIDING.num_hidden_layers)]
    outs = [
        attend_within(SLIDING, EXECUTION, each.q_BTNH, each.k_BTKH, each.v_BTKH, each.window, segments_BT)
        for each in layers
    ]
    return jnp.stack(outs), kept.v_BTKH


def test_a_map_times_the_values_is_the_attention_output():
    out_LBTNH, v_LBTKH = attended(variables()["params"], variables()["router_bias"]["layers"], *packed())
    v_LBTNH = np.repeat(v_LBTKH, SLIDING.num_attention_heads // SLIDING.num_key_value_heads, axis=3)
    found_LBTNH = np.einsum("lbnts,lbsnh->lbtnh", packed_maps(), v_LBTNH)
    np.testing.assert_allclose(found_LBTNH, out_LBTNH, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("layers", "sentence"),
    [
        ((3,), "layers has 3; the model has layers 0 to 2"),
        ((-1,), "layers has -1; the model has"),
        ((), "layers is empty; it must list at least one layer, or be None for all"),
    ],
)
def test_layers_that_do_not_exist(layers, sentence):
    with pytest.raises(ValueError, match=sentence):
        zaya_jax.attention_maps(MODEL, variables(), *packed(), layers=layers)
