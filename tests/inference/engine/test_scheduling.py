"""Chunks that several short prompts share: the texts stay those of each prompt alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from engine_requests import (
    NUM_NEW,
    Listener,
    assert_is_alone,
    engine_of,
    prompt_of,
    request_of,
    run_all,
)
from small_models import SLIDING, SMALL

from zaya_jax.inference.engine import engine as engine_module
from zaya_jax.inference.engine.decoder import decode_steps, prefill_chunk
from zaya_jax.inference.engine.scheduling import ChunkShape, PrefillTurns

CHUNK, SHORT = 32, 8
ONE, FOUR = (1, CHUNK), (4, SHORT)


@pytest.fixture
def shapes(monkeypatch):
    """Shapes of the chunks that engines read."""
    read = []

    def read_chunk(model, variables, cache, chunk, *arguments, **options):
        read.append(chunk.tokens_BT.shape)
        return prefill_chunk(model, variables, cache, chunk, *arguments, **options)

    monkeypatch.setattr(engine_module, "prefill_chunk", read_chunk)
    return read


def engine_for(config=SMALL, **options):
    return engine_of(config, **({"num_slots": 8, "prefill_chunk": CHUNK} | options))


def shorts(lengths, **params):
    """Greedy requests and others by turns."""
    rules = {}, {"temperature": 1.1}, {"temperature": 0.8, "top_k": 5, "num_top_logprobs": 2}
    return [
        request_of(
            prompt_of(length, seed), **({"max_new_tokens": 6, "seed": seed} | rules[seed % 3] | params)
        )
        for seed, length in enumerate(lengths)
    ]


@pytest.mark.parametrize("config", [SMALL, SLIDING], ids=["full", "sliding"])
def test_eight_short_prompts_need_two_chunks(config, shapes):
    engine = engine_for(config, prefill_chunk=80)
    requests = shorts([20] * 5 + [19, 20, 17], max_new_tokens=NUM_NEW)
    listeners = run_all(engine, requests)
    assert shapes == [(4, 20)] * 2
    assert engine.stats().tokens_prefilled == sum(len(each.prompt) for each in requests)
    for request, listener in zip(requests, listeners, strict=True):
        assert_is_alone(config, request, listener)
        assert all(len(new.top) == request.params.num_top_logprobs for new in listener.tokens)


def test_long_and_short_prompts_take_turns(shapes):
    requests = [request_of(prompt_of(60, 9), max_new_tokens=5), *shorts([8, 1, 5, 8, 3])]
    listeners = run_all(engine_for(), requests)
    # The long prompt's first chunk, four short ones, the long one's rest, and the last short one.
    assert shapes == [ONE, FOUR, ONE, ONE]
    for request, listener in zip(requests, listeners, strict=True):
        assert_is_alone(SMALL, request, listener)


def test_cancelled_prompts_take_no_part(shapes):
    engine, requests = engine_for(), shorts([3] * 7)
    listeners = [Listener() for _ in requests]
    handles = [engine.submit(*each) for each in zip(requests, listeners, strict=True)]
    handles[1].cancel()
    engine.step()
    handles[5].cancel()
    while engine.step():
        pass
    assert shapes == [FOUR, ONE]
    ends = ["cancelled" if number in (1, 5) else "length" for number in range(7)]
    assert [each.end for each in listeners] == ends
    for number in (0, 2, 3, 4, 6):
        assert_is_alone(SMALL, requests[number], listeners[number])


def test_a_row_with_nan_fails_alone(shapes):
    engine, requests = engine_for(prefix_bytes=0), shorts([8, 8, 5, 6])
    pool = tuple(part.at[2].set(jnp.nan) for part in engine._cache.pool)
    engine._cache = dataclasses.replace(engine._cache, pool=pool)
    listeners = run_all(engine, requests)
    assert [each.end for each in listeners] == ["length", "length", "failed", "length"]
    assert "after 5 tokens of the text the model's logits are not finite" in str(listeners[2].error)
    assert not listeners[2].tokens
    for number in (0, 1, 3):
        assert_is_alone(SMALL, requests[number], listeners[number])
    # The next owner of the row.
    for request, listener in zip(requests, run_all(engine, requests), strict=True):
        assert_is_alone(SMALL, request, listener)
    assert shapes == [FOUR] * 2


def test_rests_after_a_shared_prefix_share_a_chunk(shapes):
    """Rests of one token up to the limit, and one that is longer by a token."""
    engine, prefix = engine_for(), prompt_of(CHUNK, 50)
    run_all(engine, [request_of(prefix, max_new_tokens=1)])
    rests = 1, SHORT, 5, SHORT + 1
    requests = [
        dataclasses.replace(each, prompt=(*prefix, *each.prompt)) for each in shorts(rests, max_new_tokens=3)
    ]
    shapes.clear()
    for request, listener in zip(requests, run_all(engine, requests), strict=True):
        assert_is_alone(SMALL, request, listener)
    assert shapes == [FOUR, ONE]
    stats = engine.stats()
    assert (stats.tokens_from_prefixes, stats.tokens_prefilled) == (4 * CHUNK, CHUNK + sum(rests))


def test_several_answers_share_a_chunk_after_their_prompt_was_read_once(shapes):
    requests = [
        request_of(prompt_of(CHUNK + 4), max_new_tokens=4, temperature=1.3, seed=seed) for seed in range(4)
    ]
    engine = engine_for()
    for request, listener in zip(requests, run_all(engine, requests), strict=True):
        assert_is_alone(SMALL, request, listener)
    assert shapes == [ONE, FOUR]
    assert engine.stats().tokens_from_prefixes == 3 * CHUNK


def test_a_block_that_a_short_prompt_begins_is_saved(shapes):
    """Decoding reaches its end, where the next turn begins to read."""
    engine = engine_for()
    requests = shorts([SHORT, 7, 6], max_new_tokens=28)
    listeners = run_all(engine, requests)
    turns = [
        dataclasses.replace(request, prompt=(*request.prompt, *listener.text, *prompt_of(2, 77)))
        for request, listener in zip(requests, listeners, strict=True)
    ]
    assert shapes == [FOUR]
    for turn, listener in zip(turns, run_all(engine, turns), strict=True):
        assert_is_alone(SMALL, turn, listener)
    assert shapes == [FOUR, FOUR]
    assert engine.stats().tokens_from_prefixes == 3 * CHUNK


def test_short_prompts_compile_nothing_after_the_warm_up():
    engine = engine_for(num_slots=5)
    engine.warm_up()
    assert [*engine.programs()][:2] == ["prefill of a chunk", "prefill of 4 short prompts"]
    programs = prefill_chunk, decode_steps
    compiled = [each._cache_size() for each in programs]
    requests = [*shorts([1, 2, 8, 8, 3], with_routing=True), request_of(prompt_of(40), max_new_tokens=2)]
    assert all(each.end == "length" for each in run_all(engine, requests))
    assert [each._cache_size() for each in programs] == compiled
    assert np.isfinite([np.abs(part).max() for part in engine._cache.pool]).all()


def test_shapes_of_chunks():
    assert PrefillTurns(16, 256).of_several == ChunkShape(4, 64)
    assert PrefillTurns(3, 256).of_several == ChunkShape(3, 64)
    assert PrefillTurns(2, 32).of_several == ChunkShape(2, 8)
    for num_slots, time in ((1, 256), (16, 254), (16, 28)):
        turns = PrefillTurns(num_slots, time)
        assert (turns.of_one, turns.of_several) == (ChunkShape(1, time), None)
