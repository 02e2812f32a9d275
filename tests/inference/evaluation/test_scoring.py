"""Scores of packed requests, compared with the logits of each request alone, in one pass."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EXECUTION, SLIDING

from zaya_jax.inference.evaluation.device_pool import Workers
from zaya_jax.inference.evaluation.scoring import Scorer, make_scorer, score, score_batch, scored_batches
from zaya_jax.inference.evaluation.scoring_requests import (
    ScoringRequest,
    fill,
    pack,
    request_of,
    rolling_requests,
)
from zaya_jax.model.zaya import Zaya

LENGTH, PREFIX = 32, 2
VOCABULARY = SLIDING.vocab_size


@functools.cache
def load():
    model = Zaya(SLIDING, EXECUTION)
    return model, jax.jit(model.init)(jax.random.key(11), jnp.zeros((1, 4), jnp.int32))


def scorer(variables=None):
    return make_scorer(load()[0], variables or load()[1], length=LENGTH, prefix_id=PREFIX, num_rows=2)


@functools.partial(jax.jit, static_argnames="model")
def whole_forward(model, variables, tokens_BT):
    return model.apply(variables, tokens_BT).logits_BTV


def expected_scores(request, variables=None):
    """Returns, for each scored token, its log-probability in float64 and whether it is the most likely
    one.
    """
    tokens_1T = np.zeros((1, LENGTH), np.int32)
    tokens_1T[0, : request.num_read] = request.tokens_N[:-1]
    logits_1TV = whole_forward(load()[0], variables or load()[1], tokens_1T)
    logits_NV = np.asarray(logits_1TV, np.float64)[0, : request.num_read][-request.num_scored :]
    targets_N = request.tokens_N[-request.num_scored :]
    top_N1 = logits_NV.max(axis=1, keepdims=True)
    log_sum_N = (top_N1 + np.log(np.exp(logits_NV - top_N1).sum(axis=1, keepdims=True)))[:, 0]
    log_prob_N = logits_NV[np.arange(len(targets_N)), targets_N] - log_sum_N
    return log_prob_N, logits_NV.argmax(axis=1) == targets_N


def make(context, continuation):
    return request_of(context, continuation, prefix_id=PREFIX, length=LENGTH)


@functools.cache
def some_requests():
    """Returns requests of all lengths: without context, of one token, of a full row, and truncated on the
    left.
    """
    numbers = np.random.default_rng(3)
    shapes = [(0, 1), (0, 9), (1, 1), (30, 2), (31, 1), (5, 12), (90, 4), (7, 3), (2, 30), (3, 5), (12, 1)]
    drawn = [
        tuple(numbers.integers(0, VOCABULARY, size).tolist() for size in (context, continuation))
        for context, continuation in shapes
    ]
    return tuple(itertools.starmap(make, drawn))


def greedy_requests():
    """Returns continuations of most likely tokens, and the same with another last token."""
    actual = []
    for num in (1, 4):
        tokens = [PREFIX, 7, 9]
        for _ in range(num):
            request = ScoringRequest(np.array([*tokens, 0], np.int32), 1)
            tokens_1T = np.zeros((1, LENGTH), np.int32)
            tokens_1T[0, : len(tokens)] = tokens
            logits_1TV = np.asarray(whole_forward(*load(), tokens_1T))
            tokens.append(int(logits_1TV[0, request.num_read - 1].argmax()))
        other = [*tokens[:-1], (tokens[-1] + 1) % VOCABULARY]
        actual += [ScoringRequest(np.array(each, np.int32), num) for each in (tokens, other)]
    return actual


def test_packed_requests_score_as_alone():
    requests = [*some_requests(), *greedy_requests()]
    actual = score(scorer(), requests)
    flags = []
    for request, result in zip(requests, actual, strict=True):
        log_prob_N, is_likeliest_N = expected_scores(request)
        assert result.log_prob == pytest.approx(log_prob_N.sum(), rel=1e-5, abs=1e-5)
        assert result.is_greedy == is_likeliest_N.all()
        flags.append(result.is_greedy)
    assert flags[-4:] == [True, False, True, False]
    assert len({round(result.log_prob, 3) for result in actual}) == len(actual)


def test_order_and_neighbours_change_nothing():
    requests = list(some_requests())
    forwards = score(scorer(), requests)
    backwards = score(scorer(), requests[::-1])[::-1]
    alone = [score(scorer(), [request])[0] for request in requests]
    for one, *others in zip(forwards, backwards, alone, strict=True):
        for other in others:
            assert other.log_prob == pytest.approx(one.log_prob, rel=1e-5, abs=1e-5)
            assert other.is_greedy == one.is_greedy


def test_all_requests_use_one_program():
    score(scorer(), some_requests())
    before = score_batch._cache_size()
    score(scorer(), some_requests()[:1])
    score(scorer(), rolling_requests(np.arange(50), prefix_id=PREFIX, length=LENGTH))
    assert score_batch._cache_size() == before


def test_ties_go_to_the_first_token():
    """Two tokens with equal embeddings have equal logits, whatever the context is."""
    variables = jax.tree.map(jnp.asarray, load()[1])
    table_VD = variables["params"]["embedding"]["table"]
    request = greedy_requests()[0]
    best = int(request.tokens_N[-1])
    low, high = sorted([best, 40 if best != 40 else 41])
    table_VD = table_VD.at[jnp.array([low, high])].set(table_VD[best])
    embedding = variables["params"]["embedding"] | {"table": table_VD}
    variables = variables | {"params": variables["params"] | {"embedding": embedding}}
    both = [ScoringRequest(np.array([*request.tokens_N[:-1], last], np.int32), 1) for last in (low, high)]
    first, second = score(scorer(variables), both)
    assert first.log_prob == pytest.approx(second.log_prob, rel=1e-6)
    assert [first.is_greedy, second.is_greedy] == [True, False]
    assert [bool(expected_scores(each, variables)[1]) for each in both] == [True, False]


@pytest.mark.parametrize(
    ("context", "longest", "shape"), [(64, 3, (128, 64)), (4096, 3, (32, 256)), (4096, 1025, (4, 2048))]
)
def test_row_length_fits_the_longest_request(context, longest, shape):
    requests = [ScoringRequest(np.zeros(size + 1, np.int32), 1) for size in (1, longest)]
    assert Scorer(Workers((), ()), context, PREFIX).shape_of(requests) == shape


def test_an_empty_context_begins_with_the_prefix():
    np.testing.assert_array_equal(make([], [5, 6]).tokens_N, [PREFIX, 5, 6])
    np.testing.assert_array_equal(make([4], [5, 6]).tokens_N, [4, 5, 6])


def test_a_request_without_scored_tokens_has_probability_one():
    actual = score(scorer(), [make([3, 4], []), make([], [])])
    assert [(each.log_prob, each.is_greedy) for each in actual] == [(0.0, True)] * 2


def test_a_long_context_is_cut_on_the_left():
    request = make(list(range(50)), [7, 8])
    np.testing.assert_array_equal(request.tokens_N, [*range(19, 50), 7, 8])
    assert (request.num_read, request.num_scored) == (LENGTH, 2)
    with pytest.raises(ValueError, match="a continuation has 33 tokens; the context of 32 is too short"):
        make([1], [0] * 33)


@pytest.mark.parametrize("num_tokens", [0, 1, LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH, 3 * LENGTH + 5])
def test_windows_score_each_token_once_with_full_context(num_tokens):
    tokens = np.arange(100, 100 + num_tokens)
    requests = rolling_requests(tokens, prefix_id=PREFIX, length=LENGTH)
    scored = [request.tokens_N[len(request.tokens_N) - request.num_scored :] for request in requests]
    np.testing.assert_array_equal(np.concatenate([[], *scored]), tokens)
    whole = np.concatenate([[PREFIX], tokens])
    for request in requests:
        end = np.flatnonzero(whole == request.tokens_N[-1])[0]
        assert request.num_read == min(end, LENGTH)
        np.testing.assert_array_equal(request.tokens_N, whole[end - request.num_read : end + 1])


def test_sums_by_position_add_up():
    requests = some_requests()
    log_probs, numbers = np.zeros(6), np.zeros(6)
    for request in requests:
        log_prob_N, _ = expected_scores(request)
        positions_N = np.arange(request.num_read)[-request.num_scored :]
        classes_N = np.floor(np.log2(positions_N + 1)).astype(int)
        np.add.at(log_probs, classes_N, log_prob_N)
        np.add.at(numbers, classes_N, 1)
    batches = list(scored_batches(scorer(), requests))
    assert len(batches) > 1
    np.testing.assert_allclose(sum(np.array(each.log_prob_J) for each in batches), log_probs, 1e-5, 1e-5)
    np.testing.assert_array_equal(sum(np.array(each.num_J) for each in batches), numbers)


def test_rows_are_filled_and_no_request_is_lost():
    requests = some_requests()
    batches = list(pack(requests, num_rows=2, length=LENGTH))
    assert sorted(number for rows in batches for row in rows for number in row) == list(range(len(requests)))
    num_rows = 0
    for rows in batches:
        held = [[requests[number] for number in row] for row in rows]
        places, batch = fill(held, num_rows=2, length=LENGTH)
        assert len(set(places)) == sum(map(len, rows))
        num_rows += int(batch.segments_BT.any(axis=1).sum())
    assert num_rows <= -(-sum(request.num_read for request in requests) // LENGTH) + 1


@pytest.mark.parametrize(
    ("shape", "sentence"),
    [
        ({"length": 161}, "is 161 tokens; it must be from 1 to model.max_position_embeddings, 160"),
        ({"length": 0}, "the context is 0 tokens"),
        ({"length": 8, "num_rows": 0}, "the number of rows is 0; it must be at least 1"),
    ],
)
def test_invalid_shapes(shape, sentence):
    with pytest.raises(ValueError, match=sentence):
        make_scorer(*load(), prefix_id=PREFIX, **shape)
