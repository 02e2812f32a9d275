"""Sampling with masks, and requests with a grammar next to requests without one."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from constrained_texts import (
    END,
    EOS,
    PROMPT,
    THINK,
    THINK_END,
    TOKENIZER,
    VOCAB_SIZE,
    constraint_of,
    engine,
    load,
    new_engine,
    request_of,
    run_all,
)

from zaya_jax.errors import UserError
from zaya_jax.inference.completion import complete
from zaya_jax.inference.engine.decoder import decode_steps, prefill_chunk
from zaya_jax.inference.engine.masked_sampling import sample_masked
from zaya_jax.inference.engine.sampling import row_sampling
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.structured.compiler import GrammarCompiler
from zaya_jax.inference.structured.grammar import json_schema_grammar

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def packed(allowed_BV):
    """Masks as words of 32 bits, packed by NumPy."""
    bits_BV = np.pad(allowed_BV, ((0, 0), (0, -allowed_BV.shape[1] % 32)))
    return np.packbits(bits_BV, axis=1, bitorder="little").view("<u4")


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 70])
def test_masked_tokens(vocab_size):
    """Greedy rows take the best allowed token, and sampled rows only allowed ones."""
    random = np.random.default_rng(vocab_size)
    logits_BV = random.normal(size=(64, vocab_size)).astype(np.float32)
    allowed_BV = random.random(logits_BV.shape) < 0.3
    allowed_BV[np.arange(64), random.integers(0, vocab_size, 64)] = True
    rules = ({}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 3}, {"temperature": 1.0, "top_p": 0.5})
    params = [SamplingParams(max_new_tokens=1, seed=row, **rules[row % 4]) for row in range(64)]
    sampling = row_sampling(params, vocab_size)
    tokens_B, logprobs_B = sample_masked(jnp.asarray(logits_BV), jnp.asarray(packed(allowed_BV)), sampling)
    tokens_B = np.asarray(tokens_B)
    rows = np.arange(64)
    assert allowed_BV[rows, tokens_B].all()
    masked_BV = np.where(allowed_BV, logits_BV, -np.inf)
    np.testing.assert_array_equal(tokens_B[::4], masked_BV.argmax(axis=1)[::4])
    ranks_B = (masked_BV > masked_BV[rows, tokens_B][:, None]).sum(axis=1)
    assert (ranks_B[2::4] < 3).all(), "top_k counts allowed tokens"
    # The log-probabilities are the model's, as without a mask.
    exact_BV = logits_BV.astype(np.float64) - np.log(
        np.exp(logits_BV.astype(np.float64)).sum(1, keepdims=True)
    )
    np.testing.assert_allclose(logprobs_B, exact_BV[rows, tokens_B], rtol=1e-5, atol=1e-5)


def test_masked_sampling_has_the_distribution_of_the_allowed_tokens():
    logits_V = np.log(np.array([0.5, 0.2, 0.2, 0.1], np.float32))
    num_draws = 4000
    params = [SamplingParams(max_new_tokens=1, temperature=1.0, seed=seed) for seed in range(num_draws)]
    mask = np.full((num_draws, 1), 0b1010, np.uint32)
    logits_BV = jnp.asarray(np.tile(logits_V, (num_draws, 1)))
    tokens_B, _ = sample_masked(logits_BV, jnp.asarray(mask), row_sampling(params, 4))
    share = float(np.mean(np.asarray(tokens_B) == 1))
    # 2/3 of the draws; five standard deviations of a mean of 4000.
    assert abs(share - 2 / 3) < 5 * np.sqrt(2 / 9 / num_draws)


def mixed_requests():
    """Requests with and without a grammar, by turns, with all kinds of sampling."""
    constraint = constraint_of(PERSON)
    rules = (
        {"temperature": 0.0},
        {},
        {"top_k": 4, "top_p": 0.9},
        {"num_top_logprobs": 3, "with_routing": True},
    )
    return [
        request_of(
            constraint if number % 2 else None,
            (*PROMPT, 40 + number),
            seed=number,
            max_new_tokens=(9, 60, 33, 60)[number % 4],
            **rules[number // 2 % 4],
        )
        for number in range(8)
    ]


def test_requests_without_a_grammar_keep_their_texts():
    """Bit for bit, log-probabilities included, with other requests' grammars and without."""
    requests = mixed_requests()
    free = [
        dataclasses.replace(each, params=dataclasses.replace(each.params, constraint=None))
        for each in requests
    ]
    mixed, alone = run_all(engine(), requests), run_all(engine(), free)
    for number in range(0, len(requests), 2):
        # The rows of later requests differ, and the number of rows that decode: `generate` says what that
        # changes. Tokens must be equal all the same.
        assert mixed[number].tokens == alone[number].tokens
    first = range(0, 4, 2)
    for number in first:
        assert [each.logprob for each in mixed[number].new[:9]] == [
            each.logprob for each in alone[number].new[:9]
        ]
    for number in range(1, len(requests), 2):
        assert mixed[number].end in ("stop", "length")
        assert mixed[number].tokens != alone[number].tokens


def test_an_answer_does_not_depend_on_others():
    """The same answer alone, next to others, from the prefix cache, and by a static batch."""
    requests = mixed_requests()[1::2]
    together = run_all(engine(), requests)
    again = run_all(engine(), requests[:1])
    assert again[0].tokens == together[0].tokens
    prompt = tuple(TOKENIZER.encode("x" * 40))
    long = dataclasses.replace(requests[0], prompt=prompt)
    (first,), (second,) = run_all(engine(), [long]), run_all(engine(), [long])
    assert first.tokens == second.tokens
    (completion,) = complete(*load(), TOKENIZER, [long.prompt], [long.params])
    assert list(completion.tokens) == first.tokens
    assert completion.text == first.text
    assert completion.finish_reason == first.end


def test_prompts_with_a_grammar_share_a_chunk():
    """Two of them, with two that have none."""
    of_engine, requests = new_engine(prefill_chunk=128), mixed_requests()[:4]
    assert max(len(each.prompt) for each in requests) <= 128 // 4
    for answer, expected in zip(run_all(of_engine, requests), run_all(engine(), requests), strict=True):
        assert answer.tokens == expected.tokens
        assert answer.end == expected.end


def test_limits_stop_strings_and_thoughts():
    constraint = constraint_of(PERSON)
    (cut,) = run_all(engine(), [request_of(constraint, max_new_tokens=7)])
    assert (cut.end, len(cut.tokens)) == ("length", 7)
    assert cut.text.lstrip().startswith("{")
    params = dataclasses.replace(request_of(constraint).params, stop=(":",))
    (completion,) = complete(*load(), TOKENIZER, [PROMPT], [params])
    assert completion.finish_reason == "stop"
    assert completion.text.replace(" ", "").replace("\n", "") == '{"name"'
    # Long thoughts, which nothing but the mark may end.
    thinking = constraint.with_thoughts((THINK, THINK_END))
    (answer,) = run_all(
        engine(), [request_of(thinking, (*PROMPT, THINK), max_new_tokens=500, temperature=3.0)]
    )
    assert not set(answer.tokens[:-1]) & {EOS, END}
    if THINK_END in answer.tokens:
        rest = TOKENIZER.decode(answer.tokens[answer.tokens.index(THINK_END) + 1 :])
        assert rest[:1] in ("{", "")


def test_requests_that_cannot_be_constrained():
    constraint = constraint_of(PERSON)
    with pytest.raises(UserError, match="needs stop_token_ids"):
        engine().submit(request_of(constraint, stop_token_ids=()), print)
    other = GrammarCompiler(TOKENIZER, VOCAB_SIZE + 1).compile(json_schema_grammar({"const": 1}))
    with pytest.raises(UserError, match="compiled for 273 tokens, and the model has 272"):
        engine().submit(request_of(other), print)


def test_a_grammar_that_fails_fails_only_its_request(monkeypatch):
    constraint = constraint_of(PERSON)
    good, bad = constraint_of(PERSON), constraint_of({"const": 123456})
    start = bad.start

    def start_broken(*arguments):
        state = start(*arguments)
        state.matcher.consume_token(EOS)  # not a number: an error that the matcher never leaves
        return state

    monkeypatch.setattr(bad, "start", start_broken)
    answers = run_all(engine(), [request_of(good), request_of(bad), request_of(constraint, max_new_tokens=5)])
    assert [each.end for each in answers] == ["stop", "failed", "length"]
    assert isinstance(answers[1].error, UserError)
    assert "too complex" in str(answers[1].error)


def test_masks_compile_one_small_program_per_number_of_rows():
    of_engine = new_engine(prefix_bytes=0)
    names = [*of_engine.programs()]
    assert not [name for name in names if "mask" in name]
    masks = set(of_engine.programs(with_masks=True)) - set(names)
    assert masks == {"sampling of 1 row with masks", "sampling of 4 rows with masks"}
    of_engine.warm_up(with_masks=True)
    programs = prefill_chunk, decode_steps, sample_masked
    before = [each._cache_size() for each in programs]
    run_all(of_engine, mixed_requests())
    assert [each._cache_size() for each in programs] == before
