"""Greedy decoding of 64 tokens: transformers' cache, our cache, and our full forward pass agree."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from huggingface_reference import (
    EXECUTION,
    TOLERANCE,
    Pair,
    apply,
    build,
    padding_mask,
    random_tokens,
    relative_error,
    rope,
)

from zaya_jax.inference.engine.generate import generate_in_chunks
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.model.cache import init_cache
from zaya_jax.model.zaya import Zaya

FULL, SLIDING = "hybrid", "hybrid_sliding"
PROMPT, NEW = 9, 64


@dataclasses.dataclass(frozen=True)
class Decoded:
    tokens_BT: np.ndarray
    """The new ones."""
    logits_BTV: np.ndarray
    """From which each was chosen."""


def decode_with_reference(pair: Pair, prompt_BT: np.ndarray, mask_BT: np.ndarray | None) -> Decoded:
    mask_BT = np.ones_like(prompt_BT) if mask_BT is None else mask_BT
    out = pair.reference.generate(
        torch.from_numpy(prompt_BT).long(),
        attention_mask=torch.from_numpy(mask_BT).long(),
        max_new_tokens=NEW,
        do_sample=False,
        use_cache=True,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    new_BT = out.sequences[:, prompt_BT.shape[1] :].numpy().astype(np.int32)
    return Decoded(new_BT, torch.stack(out.logits, dim=1).numpy())


def decode_with_cache(pair: Pair, prompt_BT: np.ndarray, mask_BT: np.ndarray | None) -> Decoded:
    batch, time = prompt_BT.shape
    cache = init_cache(pair.config, batch, time + NEW, EXECUTION.dtype)
    out = apply(pair.config, pair.variables, prompt_BT, None, mask_BT, cache)
    tokens, logits = [], []
    for i in range(NEW):
        logits.append(out.logits_BTV[:, -1])
        tokens.append(jnp.argmax(logits[-1], axis=-1).astype(jnp.int32))
        if i < NEW - 1:
            out = apply(pair.config, pair.variables, tokens[-1][:, None], cache=out.cache)
    return Decoded(np.stack(tokens, axis=1), np.stack(logits, axis=1))


def score_without_cache(pair: Pair, prompt_BT, mask_BT, new_BT) -> Decoded:
    """Returns the choices at each position of the answer, from one pass over prompt and answer."""
    tokens_BT = np.concatenate([prompt_BT, new_BT[:, :-1]], axis=1)
    segments_BT = np.ones_like(tokens_BT)
    if mask_BT is not None:
        segments_BT[:, : mask_BT.shape[1]] = mask_BT
    positions_BT = np.maximum(np.cumsum(segments_BT, axis=1) - 1, 0).astype(np.int32)
    out = apply(pair.config, pair.variables, tokens_BT, positions_BT, segments_BT)
    logits_BTV = np.asarray(out.logits_BTV[:, prompt_BT.shape[1] - 1 :])
    return Decoded(logits_BTV.argmax(axis=-1), logits_BTV)


CASES = {
    "full_left_padding": ({"cca_time0": 3, "lm_head_bias": True}, "left", 4),
    "window_left_padding": (
        {"layer_types": [SLIDING, FULL, SLIDING], "sliding_window": 6, "rope_parameters": rope(1e5, 300.0)},
        "left",
        4,
    ),
    "window_beyond_the_prompt": ({"layer_types": [FULL, SLIDING, SLIDING], "sliding_window": 20}, None, 4),
    "conv_1_1_all_windows": (
        {"cca_time0": 1, "cca_time1": 1, "layer_types": [SLIDING] * 3, "sliding_window": 16},
        "left",
        8,  # seeds 4 and 5 repeat tokens
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_greedy_decoding_matches_transformers(name):
    fields, padding, seed = CASES[name]
    pair = build(seed, vocab_size=512, **fields)
    prompt_BT = random_tokens(pair, seed, 3, PROMPT)
    mask_BT = padding_mask(3, PROMPT, padding)
    theirs = decode_with_reference(pair, prompt_BT, mask_BT)
    cached = decode_with_cache(pair, prompt_BT, mask_BT)
    uncached = score_without_cache(pair, prompt_BT, mask_BT, cached.tokens_BT)

    np.testing.assert_array_equal(cached.tokens_BT, theirs.tokens_BT)
    np.testing.assert_array_equal(cached.tokens_BT, uncached.tokens_BT)
    errors = [
        relative_error(cached.logits_BTV, theirs.logits_BTV),
        relative_error(cached.logits_BTV, uncached.logits_BTV),
    ]
    distinct = [len(set(row)) for row in cached.tokens_BT.tolist()]
    print(f"{name}: against transformers {errors[0]:.1e}, without a cache {errors[1]:.1e}; tokens {distinct}")
    assert max(errors) < TOLERANCE
    assert min(distinct) > 8, f"a sequence that repeats itself tests little: {distinct}"


def test_logprobs_match_transformers():
    """For sampled tokens after prompts of two lengths; log-probabilities exclude the temperature."""
    pair = build(4, vocab_size=512, cca_time0=3, lm_head_bias=True)
    prompts = [row_T.tolist() for row_T in random_tokens(pair, 4, 2, PROMPT)]
    prompts[1] = prompts[1][4:]
    params = SamplingParams(max_new_tokens=12, temperature=1.5, seed=1)
    (rows,) = generate_in_chunks(Zaya(pair.config, EXECUTION), pair.variables, prompts, params)
    for prompt, row in zip(prompts, rows, strict=True):
        text = torch.tensor([[*prompt, *row.tokens]])
        with torch.no_grad():
            logprobs_TV = torch.log_softmax(pair.reference(text).logits[0].double(), dim=-1)
        places = torch.arange(len(prompt), text.shape[1])
        expected = logprobs_TV[places - 1, text[0, places]].numpy()
        np.testing.assert_allclose(row.logprobs, expected, rtol=TOLERANCE, atol=TOLERANCE)
