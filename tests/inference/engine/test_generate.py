"""Decoding through the cache, against the whole forward pass without one."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EXECUTION, SLIDING, SMALL

from zaya_jax.inference.engine.cache_rows import make_cache
from zaya_jax.inference.engine.decoder import (
    DecodeRows,
    PromptChunk,
    cast_matrices,
    decode_steps,
    prefill_chunk,
)
from zaya_jax.inference.engine.generate import generate, generate_in_chunks, stream
from zaya_jax.inference.engine.sampling import row_sampling
from zaya_jax.inference.engine.sampling_params import SamplingParams, as_token_ids
from zaya_jax.model.cache import init_cache
from zaya_jax.model.zaya import Zaya

VOCABULARY = SMALL.vocab_size
PROMPTS = [[5, 17, 3, 60, 0, 9, 9, 31], [44], [7, 1, 2, 3, 4, 5, 6, 50, 51, 52, 53]]
NUM_NEW = 20
CONFIGS = pytest.mark.parametrize(
    # The second one has layers of both kinds.
    "config",
    [pytest.param(SMALL, id="full", marks=pytest.mark.campaign), pytest.param(SLIDING, id="sliding")],
)


@functools.cache
def load(config):
    model = Zaya(config, EXECUTION)
    return model, jax.jit(model.init)(jax.random.key(11), jnp.zeros((1, 4), jnp.int32))


@functools.partial(jax.jit, static_argnames="model")
def whole_forward(model, variables, tokens_BT):
    return model.apply(variables, tokens_BT).logits_BTV


def best_next_tokens(config, tokens):
    """Returns the most likely next token at each position, without a cache; padding follows the text."""
    model, variables = load(config)
    tokens_BT = np.zeros((1, 64), np.int32)
    tokens_BT[0, : len(tokens)] = tokens
    return np.asarray(whole_forward(model, variables, tokens_BT))[0, : len(tokens)].argmax(axis=-1)


GREEDY = row_sampling([SamplingParams(max_new_tokens=1)], VOCABULARY)


def prompt_chunk(tokens_BT, padding=0):
    """A chunk of whole prompts, the first `padding` tokens of which are padding."""
    segments_BT = np.broadcast_to(np.arange(tokens_BT.shape[1]) >= padding, tokens_BT.shape)
    return PromptChunk(
        tokens_BT=jnp.asarray(tokens_BT, jnp.int32),
        segments_BT=jnp.asarray(segments_BT, jnp.int32),
        row_B=jnp.arange(len(tokens_BT)),
        length=jnp.asarray(0, jnp.int32),
        is_last=jnp.asarray(True),
    )


def stream_one(model, variables, prompt, *, chunk=16, context_devices=1, eos_id=None, **params):
    """`stream` with the arguments of `generate`."""
    params = SamplingParams(stop_token_ids=as_token_ids(eos_id), **params)
    return stream(model, variables, prompt, params, chunk=chunk, context_devices=context_devices)


@functools.cache
def greedy_texts(config):
    texts = generate(*load(config), PROMPTS, max_new_tokens=NUM_NEW)
    return tuple(tuple(text) for text in texts)


@CONFIGS
def test_greedy_tokens_are_the_argmax_of_a_full_forward_pass(config):
    for prompt, text in zip(PROMPTS, greedy_texts(config), strict=True):
        best = best_next_tokens(config, [*prompt, *text[:-1]])
        assert len(text) == NUM_NEW
        np.testing.assert_array_equal(text, best[len(prompt) - 1 :])
        assert len(set(text)) > 3  # varied text, because a constant one would prove little


@CONFIGS
def test_kernel_and_xla_agree_on_the_cache(config):
    """Padded prompts, and rings that have wrapped; logits are some dozen float32 roundings apart."""
    kernel = Zaya(config, dataclasses.replace(EXECUTION, decode_implementation="pallas"))
    model, variables = load(config)
    tokens = np.array([[0, 0, 0, 5, 17, 3, 60, 8], [7, 1, 2, 3, 4, 5, 6, 50]])
    segments = np.array([[0] * 3 + [1] * 5, [1] * 8], np.int32)
    cache = init_cache(config, 2, 12, EXECUTION.dtype)
    cache = jax.jit(model.apply)(variables, tokens, segments_BT=segments, cache=cache).cache
    step = jax.jit(lambda model, *rest: model.apply(variables, rest[0], cache=rest[1]), static_argnums=0)
    for token in (9, 44, 2):
        actual, expected = (step(each, np.full((2, 1), token), cache) for each in (kernel, model))
        np.testing.assert_allclose(actual.logits_BTV, expected.logits_BTV, rtol=1e-5, atol=1e-5)
        cache = expected.cache


@pytest.mark.slow
def test_chunks_match_a_full_forward_pass():
    """Chunks after other chunks: convolution state, positions and ring buffers continue where they ended."""
    model, variables = load(SLIDING)
    tokens_BT = np.random.default_rng(0).integers(0, VOCABULARY, (2, 16)).astype(np.int32)
    cache, logits = init_cache(SLIDING, 2, 16, EXECUTION.dtype), []
    step = jax.jit(model.apply)
    for chunk_BT in np.split(tokens_BT, [4, 10], axis=1):
        out = step(variables, chunk_BT, cache=cache)
        cache, logits = out.cache, [*logits, out.logits_BTV]
    expected = whole_forward(model, variables, tokens_BT)
    np.testing.assert_allclose(np.concatenate(logits, axis=1), expected, rtol=1e-4, atol=1e-4)


def test_batched_texts_equal_single_texts():
    for prompt, text in zip(PROMPTS, greedy_texts(SLIDING), strict=True):
        assert generate(*load(SLIDING), prompt, max_new_tokens=NUM_NEW) == list(text)


def test_padding_changes_nothing():
    """A longer neighbour doubles the padding, and more new tokens the cache."""
    longer = [*PROMPTS, list(range(40))]
    texts = generate(*load(SLIDING), longer, max_new_tokens=70)
    assert [tuple(text[:NUM_NEW]) for text in texts[:3]] == list(greedy_texts(SLIDING))
    assert [len(text) for text in texts] == [70] * 4


def test_prefill_memory_is_not_quadratic():
    """The prompt is read in one pass, but attention never materializes all of its scores."""
    config = dataclasses.replace(SMALL, max_position_embeddings=8192)
    model, actual = Zaya(config, EXECUTION), {}
    variables = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    for time in (2048, 4096):
        cache = jax.eval_shape(lambda: init_cache(config, 1, time + 64, EXECUTION.dtype))  # noqa: B023
        program = prefill_chunk.lower(model, variables, cache, prompt_chunk(np.ones((1, time))), GREEDY)
        actual[time] = program.compile().memory_analysis().temp_size_in_bytes
        # Scores of one head at one byte each would already be more, and there are four heads of four bytes.
        assert actual[time] < time**2
    assert actual[4096] < 2.5 * actual[2048]


@pytest.mark.parametrize("batch", [1, 8])
def test_decoding_copies_no_weights(batch):
    """What XLA converts, transposes or slices of them before the loop over tokens, each call would repeat."""
    config = dataclasses.replace(SMALL, vocab_size=4096, hidden_size=512, moe_intermediate_size=256)
    model = Zaya(config, dataclasses.replace(EXECUTION, dtype="bfloat16"))
    variables = jax.eval_shape(
        lambda: cast_matrices(model, model.init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32)))
    )
    cache = jax.eval_shape(
        lambda: dataclasses.replace(init_cache(config, batch, 64, jnp.bfloat16), empty=False)
    )
    sampling = row_sampling([SamplingParams(max_new_tokens=1)] * batch, config.vocab_size)
    rows = DecodeRows(*jnp.zeros((2, batch), jnp.int32), jnp.full((batch, 1), -1))
    program = decode_steps.lower(model, variables, cache, rows, sampling, 8, max_steps=8)
    temporary = program.compile().memory_analysis().temp_size_in_bytes
    table, logits = config.vocab_size * config.hidden_size * 2, config.vocab_size * batch * 4
    assert temporary < table / 4 + 8 * logits


def test_one_new_token():
    texts = generate(*load(SMALL), PROMPTS, max_new_tokens=1)
    assert texts == [[text[0]] for text in greedy_texts(SMALL)]


def test_other_lengths_and_parameters_do_not_recompile():
    model, variables = load(SMALL)
    programs = prefill_chunk, decode_steps
    for settings in ({}, {"seed": 3}, {"temperature": 0.5}, {"max_new_tokens": 9}, {"eos_id": 2}):
        for prompt in (PROMPTS[0], PROMPTS[1]):
            generate(model, variables, prompt, **({"max_new_tokens": NUM_NEW, "temperature": 1.0} | settings))
        if not settings:
            before = [program._cache_size() for program in programs]
    assert [program._cache_size() for program in programs] == before


def test_an_end_token_ends_only_its_row():
    texts = greedy_texts(SMALL)
    eos = texts[0][6]
    expected = [list(t[: t.index(eos) + 1]) if eos in t else list(t) for t in texts]
    assert generate(*load(SMALL), PROMPTS, max_new_tokens=NUM_NEW, eos_id=eos) == expected
    assert len(expected[0]) < NUM_NEW
    assert max(len(text) for text in expected) > len(expected[0])


def test_decoding_stops_when_all_rows_have_ended():
    """Three rows of one prompt: the loop ends before its limit."""
    model, variables = load(SMALL)
    text = greedy_texts(SMALL)[0]
    end = next(i for i in range(2, NUM_NEW) if text[i] not in text[:i])
    padding = 16 - len(PROMPTS[0])
    tokens_BT = np.tile(np.array([0] * padding + PROMPTS[0], np.int32), (3, 1))
    sampling = row_sampling([SamplingParams(max_new_tokens=1)] * 3, VOCABULARY)
    cache = make_cache(model, variables, 3, 64, padding="left")
    cache, first, _ = prefill_chunk(model, variables, cache, prompt_chunk(tokens_BT, padding), sampling)
    ends_BJ = jnp.full((3, 8), -1, jnp.int32).at[:, 0].set(text[end])
    rows = DecodeRows(first.token_B, jnp.full(3, NUM_NEW), ends_BJ)
    cache, steps, _ = decode_steps(model, variables, cache, rows, sampling, NUM_NEW, max_steps=48)
    assert steps.is_active_MB.sum(axis=0).tolist() == [end] * 3
    assert int(cache.length) == 16 + end
    assert np.asarray(steps.sampled.token_B)[:end, 0].tolist() == list(text[1 : end + 1])


def test_top_k_1_is_greedy():
    for prompt, text in zip(PROMPTS, greedy_texts(SMALL), strict=True):
        one = generate(*load(SMALL), prompt, max_new_tokens=NUM_NEW, temperature=1.0, top_k=1)
        assert one == list(text)


def test_seeds():
    sampled = functools.partial(generate, *load(SMALL), max_new_tokens=NUM_NEW, temperature=1.0)
    first = sampled(PROMPTS, seed=1)
    assert sampled(PROMPTS, seed=1) == first
    assert all(a != b for a, b in zip(sampled(PROMPTS, seed=2), first, strict=True))
    assert sampled(PROMPTS[0], seed=1) == first[0]  # the randomness of a row does not depend on its batch
    same = sampled([PROMPTS[0]] * 3, seed=1)
    assert same[0] == first[0]
    assert same[0] != same[1] != same[2]
    noise = sampled(PROMPTS[0], temperature=1000.0)
    assert len(set(noise)) > NUM_NEW // 2  # each step has its own random numbers


@pytest.mark.parametrize(
    ("config", "settings"),
    [(SLIDING, {}), (SMALL, {"temperature": 1.0, "seed": 5})],
    ids=["greedy, sliding", "sampled, full"],
)
def test_stream_matches_generate(config, settings):
    start = functools.partial(stream_one, *load(config), PROMPTS[0], max_new_tokens=NUM_NEW, **settings)
    whole = functools.partial(generate, *load(config), PROMPTS[0], max_new_tokens=NUM_NEW, **settings)
    text = whole()
    for chunk in (1, 7, 64):
        assert list(start(chunk=chunk)) == text
    eos = text[9]
    assert whole(eos_id=eos) == text[: text.index(eos) + 1]
    assert list(start(eos_id=eos)) == text[: text.index(eos) + 1]


@pytest.mark.parametrize("function", [generate, stream_one], ids=["generate", "stream"])
@pytest.mark.parametrize(
    ("prompt", "settings", "sentence"),
    [
        ([], {}, "prompt 0 is empty; it must have at least one token"),
        (
            [1, 2, 61, 3],
            {},
            "token 61 at position 2 of prompt 0 is outside the vocabulary of 61; it must be from 0 to 60",
        ),
        ([1, -1], {}, "token -1 at position 1 of prompt 0 is outside the vocabulary of 61"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        (
            [1] * 150,
            {"max_new_tokens": 11},
            "prompt 0 has 150 tokens and max_new_tokens is 11; together they must not exceed "
            "model.max_position_embeddings, 160",
        ),
        ([1], {"seed": 2**32}, "seed is 4294967296; it must be from 0 to"),
        ([1], {"temperature": -1.0}, r"temperature is -1\.0; it must be 0"),
        ([1], {"context_devices": 0}, "context_devices is 0; it must be from 1 to [1-9]"),
        ([1], {"top_k": -2}, "top_k is -2; it must be a number of tokens"),
        ([1], {"top_p": 1.5}, r"top_p is 1\.5; it must be above 0 and at most 1"),
        ([1], {"eos_id": 61}, "end token 61 is outside the vocabulary; it must be from 0 to 60"),
    ],
    ids=lambda value: "" if callable(value) else None,
)
def test_errors(function, prompt, settings, sentence):
    compiled = prefill_chunk._cache_size()
    with pytest.raises(ValueError, match=sentence):
        function(Zaya(SMALL), {}, prompt, **({"max_new_tokens": 4} | settings))
    assert prefill_chunk._cache_size() == compiled


def test_errors_name_the_prompt():
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(Zaya(SMALL), {}, [[1], []], max_new_tokens=4)
    with pytest.raises(ValueError, match="token 99 at position 0 of prompt 2 is outside"):
        generate(Zaya(SMALL), {}, [[1], [2], [99]], max_new_tokens=4)
    with pytest.raises(ValueError, match="chunk is 0; it must be at least 1 token"):
        stream_one(Zaya(SMALL), {}, [1], max_new_tokens=4, chunk=0)


def test_rows_have_their_own_parameters():
    """Each row of a batch is what its prompt is alone with its parameters, also where other rows continue."""
    model, variables = load(SMALL)
    params = [
        SamplingParams(max_new_tokens=3, temperature=1.0, seed=4),
        SamplingParams(max_new_tokens=NUM_NEW),
        SamplingParams(max_new_tokens=9, temperature=0.7, top_k=5, seed=2**32 - 1),
    ]
    (rows,) = generate_in_chunks(model, variables, PROMPTS, params)
    for prompt, each, row in zip(PROMPTS, params, rows, strict=True):
        ((alone,),) = generate_in_chunks(model, variables, [prompt], each)
        assert row.tokens == alone.tokens
        assert row.is_finished
        assert len(row.tokens) == len(row.logprobs) == each.max_new_tokens
