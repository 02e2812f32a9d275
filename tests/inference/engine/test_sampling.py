"""Drawing tokens, against numpy and against the requested probabilities."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.inference.engine.sampling import argmax_of_few, nucleus, row_sampling, sample
from zaya_jax.inference.engine.sampling_params import SamplingParams

NUM_DRAWS = 20_000
TOY_LOGITS_V = np.array([1.0, -0.5, 2.0, 0.3, 0.0])


def softmax(logits):
    probs = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return probs / probs.sum(axis=-1, keepdims=True)


def kept_by_sorting(probs_V, top_p):
    """The textbook algorithm: sort, accumulate, stop once `top_p` is reached."""
    order_V = np.argsort(-probs_V, kind="stable")
    before_V = np.cumsum(probs_V[order_V]) - probs_V[order_V]
    keep_V = np.zeros(len(probs_V), bool)
    keep_V[order_V[before_V < top_p]] = True
    return keep_V


def sample_batch(logits_BV, *, seed, **params):
    """Samples rows that draw from numbered streams of one seed."""
    rows = [SamplingParams(max_new_tokens=1, seed=seed, **params)] * len(logits_BV)
    return sample(logits_BV, row_sampling(rows, logits_BV.shape[1], streams=range(len(rows))))


def draw_frequencies(logits_V, **params):
    """Shares of tokens among many rows of the same logits."""
    logits_BV = jnp.tile(jnp.asarray(logits_V, jnp.float32), (NUM_DRAWS, 1))
    tokens_B = np.asarray(sample_batch(logits_BV, seed=3, **params))
    return np.bincount(tokens_B, minlength=len(logits_V)) / NUM_DRAWS


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.9, 0.999])
def test_nucleus_matches_sorting(top_p):
    logits_BV = np.random.default_rng(0).normal(size=(6, 500)).astype(np.float32) * 3
    probs_BV = jax.nn.softmax(logits_BV, axis=-1)
    expected_BV = [kept_by_sorting(probs_V, top_p) for probs_V in np.asarray(probs_BV, np.float64)]
    np.testing.assert_array_equal(np.asarray(nucleus(probs_BV, top_p)), expected_BV)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, [True, False, False, False]),  # never empty
        (0.5, [True, False, False, False]),  # reached exactly by the most likely token
        (0.51, [True, True, True, False]),  # as likely as the last of the set: both stay
        (1.0, [True, True, True, False]),
    ],
)
def test_nucleus_by_hand(top_p, kept):
    probs_BK = jnp.array([[0.5, 0.25, 0.25, 0.0]])
    np.testing.assert_array_equal(np.asarray(nucleus(probs_BK, top_p))[0], kept)


def test_nucleus_selects_all_if_rounding_never_reaches_top_p():
    probs_BK = jnp.array([[0.6, 0.3]])  # as if the sum had lost its last digits
    assert np.asarray(nucleus(probs_BK, 0.95)).all()


@pytest.mark.parametrize(
    "rule",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 3},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.8},
    ],
    ids=str,
)
def test_frequencies_match_probabilities(rule):
    probs_V = softmax(TOY_LOGITS_V / rule["temperature"])
    if "top_k" in rule:
        probs_V[np.argsort(-probs_V)[rule["top_k"] :]] = 0
        probs_V /= probs_V.sum()
    if "top_p" in rule:
        probs_V *= kept_by_sorting(probs_V, rule["top_p"])
        probs_V /= probs_V.sum()
    found_V = draw_frequencies(TOY_LOGITS_V, **rule)
    # Five standard deviations of a binomial share; and exactly 0 for an excluded token.
    bound_V = 5 * np.sqrt(probs_V * (1 - probs_V) / NUM_DRAWS)
    assert (np.abs(found_V - probs_V) <= bound_V).all(), (found_V, probs_V)
    assert (found_V[probs_V == 0] == 0).all()


def test_top_k_1_is_greedy_even_in_a_tie():
    logits_BV = jnp.array([[0.0, 3.0, 3.0], [5.0, 1.0, 5.0], [-1.0, -2.0, -0.5]])
    greedy_B = sample_batch(logits_BV, seed=0, temperature=0)
    np.testing.assert_array_equal(greedy_B, [1, 0, 2])
    for seed in range(5):
        one_B = sample_batch(logits_BV, seed=seed, temperature=1.5, top_k=1)
        np.testing.assert_array_equal(one_B, greedy_B)
    assert greedy_B.dtype == one_B.dtype == jnp.int32


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("vocab_size", [1, 7, 5003])
@pytest.mark.parametrize("special", [(), (np.nan,), (np.inf, np.nan), (-np.inf,), (0.0, -0.0), (9.0,)])
def test_argmax_of_few_rows_is_that_of_numpy(num_rows, vocab_size, special):
    """Also of rows with ties, infinities and NaN, wherever they are."""
    numbers = np.random.default_rng(vocab_size)
    logits = numbers.normal(size=(num_rows, vocab_size)).astype(np.float32)
    for row in logits:
        for value in special:
            row[numbers.integers(vocab_size, size=2)] = value
    tokens = jax.jit(argmax_of_few)(logits)
    assert tokens.dtype == jnp.int32
    np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
    np.testing.assert_array_equal(jax.jit(argmax_of_few)(np.full_like(logits, -np.inf)), 0)


def test_a_vanishing_temperature_is_greedy_and_not_nan():
    logits_BV = jnp.array([[0.0, 3.0, 2.999], [-80.0, 1.0, 90.0]])
    for temperature in (1e-30, 1e-60):
        tokens_B = sample_batch(logits_BV, seed=0, temperature=temperature, top_p=0.9)
        np.testing.assert_array_equal(tokens_B, [1, 2])


def test_disabled_filters_change_nothing():
    logits_BV = jax.random.normal(jax.random.key(7), (64, 40))
    plain_B = sample_batch(logits_BV, seed=1, temperature=1.3)
    for off in ({"top_k": 0}, {"top_k": None, "top_p": 1.0}, {"top_k": 0, "top_p": 1}):
        np.testing.assert_array_equal(sample_batch(logits_BV, seed=1, temperature=1.3, **off), plain_B)
    all_B = sample_batch(logits_BV, seed=1, temperature=1.3, top_k=400)
    assert ((all_B >= 0) & (all_B < 40)).all()  # more than the vocabulary selects all


def test_draws_do_not_depend_on_other_rows():
    logits_BV = jax.random.normal(jax.random.key(7), (5, 40))
    many_B = sample_batch(logits_BV, seed=1, temperature=1.0)
    for rows in (1, 3):
        np.testing.assert_array_equal(sample_batch(logits_BV[:rows], seed=1, temperature=1.0), many_B[:rows])
    same_BV = jnp.tile(logits_BV[:1], (200, 1))
    assert len(set(np.asarray(sample_batch(same_BV, seed=1, temperature=1.0)).tolist())) > 5


def test_draws_do_not_depend_on_parameters_of_other_rows():
    """Greedy, plain and filtered rows in one batch draw as each does alone."""
    logits_BV = jax.random.normal(jax.random.key(7), (4, 40))
    settings = [{"temperature": 0.0}, {"temperature": 1.3}, {"temperature": 0.8, "top_k": 5}, {"top_p": 0.7}]
    settings[3] |= {"temperature": 1.5}
    rows = [SamplingParams(max_new_tokens=1, seed=9, **each) for each in settings]
    found_B = sample(logits_BV, row_sampling(rows, 40))
    for number, row in enumerate(rows):
        (alone,) = sample(logits_BV[number : number + 1], row_sampling([row], 40))
        assert found_B[number] == alone


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        ({"temperature": -0.1}, r"temperature is -0\.1; it must be 0 \(greedy\) or above"),
        ({"temperature": float("nan")}, "temperature is nan; it must be 0"),
        ({"temperature": float("inf")}, "temperature is inf; it must be 0"),
        ({"top_k": -1}, "top_k is -1; it must be a number of tokens, or None or 0 to disable it"),
        ({"top_p": 0.0}, r"top_p is 0\.0; it must be above 0 and at most 1"),
        ({"top_p": 1.1}, r"top_p is 1\.1; it must be above 0 and at most 1"),
    ],
    ids=str,
)
def test_invalid_parameters(rule, sentence):
    with pytest.raises(ValueError, match=sentence):
        SamplingParams(max_new_tokens=1, **rule)
