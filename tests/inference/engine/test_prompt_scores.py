"""Scores of prompts read in chunks, compared with one forward pass over the whole prompt."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EXECUTION, SLIDING, SMALL

from zaya_jax.inference.engine import prompt_scores
from zaya_jax.inference.engine.prompt_scores import PromptScorer
from zaya_jax.model.zaya import Zaya

CHUNK, LONGEST = 8, 40


@functools.cache
def load(config):
    model = Zaya(config, EXECUTION)
    variables = jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))
    return model, variables, jax.jit(lambda tokens_BT: model.apply(variables, tokens_BT).logits_BTV)


@functools.cache
def scorer_of(config):
    model, variables, _ = load(config)
    scorer = PromptScorer(model, variables, max_length=LONGEST)
    scorer.warm_up()
    return scorer


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    monkeypatch.setattr(prompt_scores, "SCORE_CHUNK", CHUNK)


@pytest.mark.parametrize("config", [SMALL, SLIDING], ids=["full", "sliding"])
def test_scores_match_a_forward_pass(config):
    """Consecutive prompts, shorter and longer than a chunk, around its size, and of the maximum length."""
    random = np.random.default_rng(0)
    whole = random.integers(0, config.vocab_size, (1, LONGEST), dtype=np.int32)
    expected_TV = np.asarray(jax.nn.log_softmax(load(config)[2](whole)[0]))
    for length in (LONGEST, 1, 2, CHUNK, CHUNK + 1, 3 * CHUNK, 29):
        tokens = whole[0, :length].tolist()
        actual = scorer_of(config).score(tokens, 5)
        own = expected_TV[np.arange(length - 1), tokens[1:]]
        np.testing.assert_allclose(actual.logprobs, own, rtol=1e-4, atol=1e-4)
        assert len(actual.top) == length - 1
        for top, row_V in zip(actual.top, expected_TV, strict=False):
            values = [logprob for _, logprob in top]
            np.testing.assert_allclose(values, np.sort(row_V)[::-1][:5], rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose([row_V[token] for token, _ in top], values, rtol=1e-4, atol=1e-4)


def test_a_greedy_token_has_equal_logprobs_in_both_places():
    _, _, forward = load(SMALL)
    tokens = [5]
    for _ in range(12):  # the text that the network would generate
        padded = np.zeros((1, LONGEST), np.int32)
        padded[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(forward(padded)[0, len(tokens) - 1])))
    actual = scorer_of(SMALL).score(tokens, 1)
    assert [top[0] for top in actual.top] == list(zip(tokens[1:], actual.logprobs, strict=True))


@pytest.mark.parametrize("num_top", [0, 1, 2, 7, 20])
def test_all_numbers_of_top_tokens_use_one_program(num_top):
    scorer = scorer_of(SMALL)
    scorer.score([1, 2], 3)
    before = prompt_scores._score._cache_size()
    actual = scorer.score([1, 2, 3, 4], num_top)
    assert [len(each) for each in actual.top] == [num_top] * 3
    assert actual.logprobs == scorer.score([1, 2, 3, 4], 20).logprobs
    assert prompt_scores._score._cache_size() == before
