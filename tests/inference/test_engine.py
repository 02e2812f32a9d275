"""The engine: requests that come and go, against each of them alone through `generate`."""

import collections
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import EXECUTION, SLIDING, SMALL

from zaya_jax.inference.engine import Engine, EngineThread, Failed, Finished, Full, Request, Tokens
from zaya_jax.inference.generate import Settings, follow
from zaya_jax.model.zaya import Zaya

SLOTS, LENGTH, CHUNK = 3, 96, 8
NUM_NEW = 20
CONFIGS = pytest.mark.parametrize("config", [SMALL, SLIDING], ids=["full", "sliding"])


@functools.cache
def load(config):
    model = Zaya(config, EXECUTION)
    return model, jax.jit(model.init)(jax.random.key(11), jnp.zeros((1, 4), jnp.int32))


def engine_of(config, **options):
    return Engine(
        *load(config), **({"num_slots": SLOTS, "max_length": LENGTH, "prefill_chunk": CHUNK} | options)
    )


class Listener:
    """What was told of a request."""

    def __init__(self):
        self.tokens, self.end, self.error, self.num_events = [], None, None, 0

    def __call__(self, event):
        assert self.end is None, "no event follows the last"
        self.num_events += 1
        if isinstance(event, Tokens):
            assert event.new
            self.tokens += event.new
        else:
            self.end = event.reason if isinstance(event, Finished) else "failed"
            self.error = event.error if isinstance(event, Failed) else None

    @property
    def text(self):
        return [new.token for new in self.tokens]


def run_all(engine, requests):
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        engine.submit(request, listener)
    while engine.step():
        pass
    return listeners


@functools.cache
def alone(config, request):
    """Tokens and log-probabilities of `generate`'s loop for this prompt only."""
    names = "temperature", "top_p", "top_k", "seed"
    settings = Settings(max_new_tokens=NUM_NEW, **{name: getattr(request, name) for name in names})
    (written,) = follow(*load(config), [request.prompt], settings)
    tokens, logprobs = written.tokens_BM[0].tolist(), written.logprobs_BM[0].tolist()
    num = request.max_new_tokens
    if request.eos_id in tokens:
        num = min(num, tokens.index(request.eos_id) + 1)
    return tokens[:num], logprobs[:num]


def assert_is_alone(config, request, listener):
    tokens, logprobs = alone(config, request)
    assert listener.text == tokens
    np.testing.assert_allclose([new.logprob for new in listener.tokens], logprobs, rtol=1e-5, atol=1e-5)
    assert listener.end == ("stop" if tokens[-1] == request.eos_id else "length")


def random_request(random, config):
    """Greedy or sampled; prompts of 33 to 60 tokens, for one shape of the reference's."""
    prompt = tuple(random.integers(0, config.vocab_size, random.integers(33, 61)).tolist())
    rules = (
        {},
        {"temperature": 1.3, "seed": int(random.integers(2**32))},
        {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "seed": int(random.integers(2**31))},
    )
    request = Request(
        prompt=prompt, max_new_tokens=int(random.integers(1, NUM_NEW + 1)), **rules[random.integers(3)]
    )
    if random.random() < 0.3:  # an end that comes: one of its own tokens
        request = dataclasses.replace(request, eos_id=alone(config, request)[0][-1])
    return dataclasses.replace(request, with_routing=bool(random.random() < 0.3))


@CONFIGS
def test_requests_that_come_and_go_are_each_alone(config):
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
