"""The engine: overlapping requests, compared with each of them alone through `generate`."""

import dataclasses
import functools
import logging
import queue
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine_requests import (
    CHUNK,
    LENGTH,
    NUM_NEW,
    SLOTS,
    Listener,
    alone,
    assert_is_alone,
    engine_of,
    load,
    prompt_of,
    request_of,
    run_all,
    with_params,
)
from small_models import EXECUTION, SLIDING, SMALL

from zaya_jax.inference.chat.session import ChatSession
from zaya_jax.inference.engine import engine as engine_module
from zaya_jax.inference.engine.cache_rows import CachedBlock, copy_block, paste_block
from zaya_jax.inference.engine.decoder import decode_steps, prefill_chunk
from zaya_jax.inference.engine.engine import Engine
from zaya_jax.inference.engine.engine_thread import EngineThread
from zaya_jax.inference.engine.prefix_cache import PrefixCache
from zaya_jax.inference.engine.request import Failed, Finished, QueueFull
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.model.cache import init_cache
from zaya_jax.model.zaya import Zaya

CONFIGS = pytest.mark.parametrize("config", [SMALL, SLIDING], ids=["full", "sliding"])


def random_request(random, config):
    """Greedy and sampled requests with prompts of 33 to 60 tokens, which need one shape in the reference."""
    prompt = tuple(random.integers(0, config.vocab_size, random.integers(33, 61)).tolist())
    rules = (
        {},
        {"temperature": 1.3, "seed": int(random.integers(2**32))},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": int(random.integers(2**31))},
    )
    request = request_of(
        prompt, max_new_tokens=int(random.integers(1, NUM_NEW + 1)), **rules[random.integers(3)]
    )
    if random.random() < 0.3:  # an end token that occurs: one of the generated tokens
        request = with_params(request, eos_id=alone(config, request)[0][-1])
    return with_params(request, with_routing=bool(random.random() < 0.3))


@CONFIGS
def test_overlapping_requests_equal_single_texts(config):
    random = np.random.default_rng(5)
    engine, asked = engine_of(config), []
    for _ in range(14):
        request, listener = random_request(random, config), Listener()
        engine.submit(request, listener)
        asked.append((request, listener))
        for _ in range(random.integers(0, 6)):
            engine.step()
    while engine.step():
        pass
    for request, listener in asked:
        assert_is_alone(config, request, listener)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, SLOTS)
    assert stats.tokens_generated == sum(len(listener.tokens) for _, listener in asked)
    assert stats.tokens_prefilled == sum(len(request.prompt) for request, _ in asked)


def test_short_prompts_and_other_parameters_compile_nothing():
    engine = engine_of(SMALL)
    engine.warm_up()
    assert engine.stats() == engine_of(SMALL).stats()
    programs = prefill_chunk, decode_steps, copy_block, paste_block
    compiled = [program._cache_size() for program in programs]
    run_all(engine, [request_of(prompt_of(33), max_new_tokens=4)] * SLOTS)
    requests = [
        request_of(prompt_of(1), max_new_tokens=1),
        request_of(prompt_of(CHUNK), max_new_tokens=NUM_NEW),
        request_of(prompt_of(CHUNK + 1), max_new_tokens=NUM_NEW, num_top_logprobs=3),
        request_of(prompt_of(2), max_new_tokens=2, temperature=0.3, top_k=2, top_p=0.5, seed=7),
    ]
    listeners = run_all(engine, requests)
    # Counted before the texts are compared with `generate`, which runs the same functions on other shapes.
    assert [program._cache_size() for program in programs] == compiled
    for request, listener in zip(requests[:3], listeners, strict=False):
        assert_is_alone(SMALL, request, listener)


_COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, _, **about: _COMPILED.append(about) if event.endswith("backend_compile_duration") else None
)


def test_requests_compile_nothing_after_the_warm_up():
    """Weights of a checkpoint are committed to a device; the rows of a new cache must be so too."""
    model = Zaya(dataclasses.replace(SMALL, vocab_size=62), EXECUTION)  # which no other test has compiled
    variables = jax.jit(model.init)(jax.random.key(11), jnp.zeros((1, 4), jnp.int32))
    _COMPILED.clear()
    engine = Engine(
        model,
        jax.device_put(variables, jax.devices()[0]),
        num_slots=1,
        max_length=LENGTH,
        prefill_chunk=CHUNK,
    )
    engine.warm_up()
    assert [*engine.programs()] == [
        "prefill of a chunk",
        "decoding of 1 row",
        "copies of shared prefixes",
        "clearing of a row",
    ]
    assert len(_COMPILED) >= 2  # those that depend on the vocabulary
    _COMPILED.clear()
    settings = [
        {},
        {"temperature": 0.7, "seed": 5},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.2, "top_p": 0.8, "num_top_logprobs": 20},
        {"with_routing": True, "eos_id": 7},
    ]
    for length in (1, CHUNK, 2 * CHUNK + 3):
        requests = [request_of(prompt_of(length), max_new_tokens=12, **each) for each in settings]
        for number in (1, len(requests)):
            assert all(each.end for each in run_all(engine, requests[:number]))
    engine._clear_row()
    assert not _COMPILED


@CONFIGS
def test_the_next_turn_prefills_only_new_tokens(config):
    """Reuses blocks of a prompt and of its answer, with the convolution state and ring buffers after them."""
    engine = engine_of(config)
    first = request_of(prompt_of(33), max_new_tokens=NUM_NEW)
    (answer,) = run_all(engine, [first])
    assert engine.stats().tokens_from_prefixes == 0
    second = request_of(
        (*first.prompt, *answer.text, *prompt_of(5, seed=1)), max_new_tokens=NUM_NEW, temperature=0.9
    )
    listener = Listener()
    ticket = engine.submit(second, listener)
    while engine.step():
        pass
    assert_is_alone(config, second, listener)
    # The prompt and all of the answer except its last token were read; complete blocks of these are kept.
    kept = (33 + NUM_NEW - 1) // CHUNK * CHUNK
    assert ticket.num_cached == kept
    stats = engine.stats()
    assert (stats.tokens_from_prefixes, stats.tokens_prefilled) == (kept, 33 + 58 - kept)
    other = dataclasses.replace(second, prompt=(prompt_of(1)[0] ^ 1, *second.prompt[1:]))
    assert_is_alone(config, other, run_all(engine, [other])[0])  # equal except for the first token
    assert engine.stats().tokens_from_prefixes == kept
    assert_is_alone(config, other, run_all(engine, [other])[0])  # its later blocks differ
    assert engine.stats().tokens_from_prefixes == kept + (58 - 1) // CHUNK * CHUNK


def test_several_answers_prefill_their_prompt_once():
    engine = engine_of(SMALL)
    requests = [request_of(prompt_of(40), max_new_tokens=6, temperature=1.3, seed=seed) for seed in range(3)]
    for request, listener in zip(requests, run_all(engine, requests), strict=True):
        assert_is_alone(SMALL, request, listener)
    # The last token of a prompt is always read, and with it its block.
    assert engine.stats().tokens_from_prefixes == 2 * 32
    assert engine.stats().tokens_prefilled == 40 + 2 * 8


def test_the_prefix_cache_stays_below_its_limit():
    engine = engine_of(SMALL)
    run_all(engine, [request_of(prompt_of(CHUNK), max_new_tokens=1)])
    size = engine.stats().prefix_bytes
    assert size > 0
    bound = 5 * size + size // 2
    engine, seen = engine_of(SMALL, prefix_bytes=bound), []
    for seed in (0, 1, 0):
        engine.submit(request_of(prompt_of(33, seed), max_new_tokens=2), Listener())
        while engine.step():
            seen.append(engine.stats().prefix_bytes)
    assert max(seen) == 5 * size
    # The later ones of the first prompt's four blocks were evicted, the first is still found.
    assert engine.stats().tokens_from_prefixes == CHUNK
    engine = engine_of(SMALL, prefix_bytes=0)
    run_all(engine, [request_of(prompt_of(33), max_new_tokens=1)] * 2)
    assert (engine.stats().prefix_bytes, engine.stats().tokens_from_prefixes) == (0, 0)


def test_blocks_are_evicted_before_their_ancestors():
    def block():
        return CachedBlock(jnp.zeros((1, 1, 1, 1)), jnp.zeros((1, 1, 1, 1)), ())  # of 8 bytes

    prefixes = PrefixCache(32)
    for names in ([b"a"], [b"a", b"b"], [b"x"], [b"a", b"b", b"c"]):
        prefixes.put(names, block())
    prefixes.put([b"y"], block())
    assert [prefixes.get(name) is not None for name in (b"x", b"a", b"b", b"c", b"y")] == [False, *[True] * 4]
    prefixes.put([b"z"], block())
    assert [prefixes.get(name) is not None for name in (b"a", b"b", b"c")] == [True, True, False]
    prefixes.drop([b"a", b"nobody's"])
    assert prefixes.num_bytes == 24
    with pytest.raises(ValueError, match="prefix_bytes is -1; it must be a number of bytes"):
        PrefixCache(-1)


@functools.partial(jax.jit, static_argnames="model")
def pass_over(model, variables, tokens_1T):
    """Returns logits, classes and class probabilities of a text that is read in one pass."""
    cache = init_cache(model.config, 1, tokens_1T.shape[1], model.execution.dtype)
    out = model.apply(variables, tokens_1T, cache=cache)
    return out.logits_BTV[0], out.router.experts_LBT[:, 0], out.router.probabilities_LBT[:, 0]


def pass_over_text(config, request, listener):
    tokens = [*request.prompt, *listener.text]
    return map(np.asarray, pass_over(*load(config), np.array([tokens + [0] * (80 - len(tokens))])))


@CONFIGS
def test_routing_matches_a_forward_pass(config):
    engine = engine_of(config)
    requests = [
        request_of(prompt_of(n), max_new_tokens=NUM_NEW, with_routing=True, temperature=1.0, seed=n)
        for n in (44, 37, 60)
    ]
    ended = with_params(requests[1], eos_id=alone(config, requests[1])[0][7])
    for request, listener in zip([*requests, ended], run_all(engine, [*requests, ended]), strict=True):
        assert_is_alone(config, request, listener)
        _, experts_LT, probabilities_LT = pass_over_text(config, request, listener)
        new = slice(len(request.prompt), len(request.prompt) + len(listener.text))
        tokens = listener.tokens
        if request.params.stop_token_ids:  # the model never reads an end token
            assert tokens.pop().experts_L is None
            new = slice(new.start, new.stop - 1)
        np.testing.assert_array_equal(np.transpose([each.experts_L for each in tokens]), experts_LT[:, new])
        found_LT = np.transpose([each.probabilities_L for each in tokens])
        np.testing.assert_allclose(found_LT, probabilities_LT[:, new], rtol=1e-4, atol=1e-5)
    assert len(np.unique(experts_LT)) > 1


def test_top_logprobs_match_a_forward_pass():
    engine = engine_of(SMALL)
    requests = [
        request_of(prompt_of(40), max_new_tokens=5, num_top_logprobs=num, temperature=num / 9, seed=4)
        for num in (0, 20, 3)
    ]
    for request, listener in zip(requests, run_all(engine, requests), strict=True):
        logits_TV, *_ = pass_over_text(SMALL, request, listener)
        for place, new in enumerate(listener.tokens, start=len(request.prompt) - 1):
            logprobs_V = np.asarray(jax.nn.log_softmax(logits_TV[place]))
            best = np.argsort(-logprobs_V)[: request.params.num_top_logprobs]
            assert [token for token, _ in new.top] == best.tolist()
            np.testing.assert_allclose([x for _, x in new.top], logprobs_V[best], rtol=1e-4, atol=1e-4)


def test_cancellation_frees_the_slot_and_keeps_the_others():
    engine = engine_of(SMALL)
    requests = [
        request_of(prompt_of(33 + n, n), max_new_tokens=NUM_NEW, temperature=1.0, seed=n) for n in range(6)
    ]
    listeners = [Listener() for _ in requests]
    tickets = [engine.submit(*each) for each in zip(requests, listeners, strict=True)]
    while not listeners[0].tokens:
        engine.step()
    for number in (0, 2, 4):  # generating, holding a slot, and waiting
        tickets[number].cancel()
    engine.step()
    assert [listeners[number].end for number in (0, 2, 4)] == ["cancelled"] * 3
    assert engine.stats().waiting == 0  # the waiting request has both slots
    while engine.step():
        pass
    for number in (1, 3, 5):
        assert_is_alone(SMALL, requests[number], listeners[number])
    text = listeners[0].text
    assert text == alone(SMALL, requests[0])[0][: len(text)]
    tickets[1].cancel()
    assert not engine.step()
    assert engine.stats().free_slots == SLOTS


def test_a_long_prompt_stalls_nobody():
    """A running text gets a token per step, and a short prompt is answered before the long one."""
    engine, writer, long, short = engine_of(SMALL), Listener(), Listener(), Listener()
    engine.submit(request_of(prompt_of(3), max_new_tokens=60), writer)
    engine.step()
    engine.submit(request_of(prompt_of(90, 1), max_new_tokens=1), long)
    engine.step()
    engine.submit(request_of(prompt_of(5, 2), max_new_tokens=1), short)
    steps = 0
    while not long.end:
        before, steps = len(writer.tokens), steps + 1
        engine.step()
        assert len(writer.tokens) == before + 1
        assert bool(short.end) == (steps >= 2)
    assert steps == 12  # eleven remaining chunks, and those of the short prompt


def test_a_text_with_nan_fails_alone():
    """The slot, its blocks and its next owner are not affected."""
    engine, requests = (
        engine_of(SMALL),
        [request_of(prompt_of(33, n), max_new_tokens=NUM_NEW) for n in range(4)],
    )
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(request, listener)
    while not listeners[1].tokens:
        engine.step()
    row = next(each.row for each in engine._running if each.handle.request is requests[0])
    pool = tuple(part.at[row].set(jnp.nan) for part in engine._cache.pool)
    engine._cache = dataclasses.replace(engine._cache, pool=pool)
    while engine.step():
        pass
    assert listeners[0].end == "failed"
    assert "are not finite numbers" in str(listeners[0].error)
    assert len(listeners[0].text) < NUM_NEW
    for number in (1, 2, 3):  # a neighbor, and the next text in its slot
        assert_is_alone(SMALL, requests[number], listeners[number])
    assert_is_alone(SMALL, requests[0], run_all(engine, requests[:1])[0])


def test_a_failing_receiver_loses_only_its_text(caplog):
    engine, listener = engine_of(SMALL), Listener()
    request = request_of(prompt_of(33), max_new_tokens=NUM_NEW)

    def broken(event):
        raise OSError("the line is dead")

    with caplog.at_level(logging.CRITICAL):
        engine.submit(request, broken)
        engine.submit(request, listener)
        while engine.step():
            pass
    assert_is_alone(SMALL, request, listener)
    assert engine.stats().tokens_generated < 2 * NUM_NEW


def test_the_queue_is_bounded():
    engine = engine_of(SMALL, max_waiting=2)
    request = request_of((1,), max_new_tokens=1)
    tickets = [engine.submit(request, Listener()) for _ in range(2)]
    with pytest.raises(QueueFull, match="the queue is full: 2 requests are waiting"):
        engine.submit(request, Listener())
    tickets[0].cancel()
    engine.step()
    engine.submit(request, Listener())


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"prompt": ()}, "the prompt is empty; it must have at least one token"),
        ({"prompt": (1, 61)}, "token 61 at position 1 of the prompt is outside the vocabulary of 61"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ({"max_new_tokens": 96}, "together they must not exceed max_length, 96"),
        ({"temperature": -1.0}, r"temperature is -1\.0"),
        ({"top_p": 1.5}, r"top_p is 1\.5"),
        ({"seed": -1}, "seed is -1; it must be from 0 to"),
        ({"eos_id": 61}, "end token 61 is outside the vocabulary; it must be from 0 to 60"),
        ({"num_top_logprobs": 21}, "num_top_logprobs is 21; it must be from 0 to 20"),
    ],
    ids=str,
)
def test_invalid_requests(fields, sentence):
    with pytest.raises(ValueError, match=sentence):
        engine_of(SMALL).submit(request_of(**({"prompt": (1,), "max_new_tokens": 1} | fields)), Listener())


def test_invalid_engines():
    with pytest.raises(ValueError, match="max_length is 161; it must be from 1 to"):
        engine_of(SMALL, max_length=161)
    with pytest.raises(ValueError, match="num_slots is 0; it must be at least 1"):
        engine_of(SMALL, num_slots=0)


def test_the_thread_steps_while_there_is_work():
    engine, events = engine_of(SMALL), queue.Queue()
    request = request_of(prompt_of(33), max_new_tokens=NUM_NEW)
    with EngineThread(engine) as thread:
        for _ in range(2):  # it has waited in between
            listener = Listener()
            engine.submit(request, lambda event, listener=listener: (listener(event), events.put(event)))
            while not isinstance(events.get(timeout=60), Finished):
                pass
            assert_is_alone(SMALL, request, listener)
        long, began, may_go_on = Listener(), threading.Event(), threading.Event()
        engine.submit(
            with_params(request, max_new_tokens=60),
            lambda event: (long(event), began.set(), may_go_on.wait(60)),
        )
        assert began.wait(60)
        threading.Timer(0.2, may_go_on.set).start()  # while the thread is being stopped
    assert long.end == "cancelled"
    assert thread.error is None
    with pytest.raises(RuntimeError, match="the engine has ended: it was closed"):
        engine.submit(request, Listener())


def test_a_device_error_fails_all_requests(monkeypatch, caplog):
    def lost(*_, **__):
        raise OSError("the device is lost")

    monkeypatch.setattr(engine_module, "decode_steps", lost)
    engine, events = engine_of(SMALL), queue.Queue()
    for _ in range(SLOTS + 1):
        engine.submit(request_of((1, 2), max_new_tokens=5), events.put)
    with caplog.at_level(logging.CRITICAL), EngineThread(engine) as thread:
        ends = [
            event for event in (events.get(timeout=60) for _ in range(SLOTS + 2)) if isinstance(event, Failed)
        ]
    assert str(thread.error) == "the device is lost"
    assert {event.error for event in ends} == {thread.error}
    assert len(ends) == SLOTS + 1
    with pytest.raises(RuntimeError, match="the engine has ended: the device is lost"):
        engine.submit(request_of((1,), max_new_tokens=1), events.put)


def test_a_conversation_is_prefilled_once():
    """As in `zaya chat`: texts that outgrow the cache, and one that is abandoned halfway."""
    session = ChatSession(*load(SMALL), chunk=CHUNK)
    params = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.9, seed=3)
    output = prompt_of(33)
    left = session.stream(output, params)
    begun = [next(left) for _ in range(3)]
    with pytest.raises(ValueError, match="the prompt is empty"):
        session.stream([], params)
    for turn in range(2):
        request = request_of(output, max_new_tokens=NUM_NEW, temperature=0.9, seed=3)
        text = list(session.stream(output, params))
        assert text == alone(SMALL, request)[0]
        assert turn or text[:3] == begun
        read = session.stats().tokens_prefilled
        output = (*output, *text, *prompt_of(4, seed=turn))
    # The second turn has 57 tokens, too many for the first slot; 52 of them were computed before.
    assert read == 57 - 48
