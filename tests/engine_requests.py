"""Requests to an engine with a small network, and the texts of `generate` that they must equal."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from small_models import EXECUTION, SMALL

from zaya_jax.inference.engine.engine import Engine
from zaya_jax.inference.engine.generate import generate_in_chunks
from zaya_jax.inference.engine.request import Failed, Finished, Request, Tokens
from zaya_jax.inference.engine.sampling_params import SamplingParams, as_token_ids
from zaya_jax.model.zaya import Zaya

SLOTS, LENGTH, CHUNK = 3, 96, 8
NUM_NEW = 20


@functools.cache
def load(config):
    model = Zaya(config, EXECUTION)
    return model, jax.jit(model.init)(jax.random.key(11), jnp.zeros((1, 4), jnp.int32))


def request_of(prompt, *, eos_id=None, **params):
    """A request with the arguments of `generate`."""
    return Request(tuple(prompt), SamplingParams(stop_token_ids=as_token_ids(eos_id), **params))


def with_params(request, *, eos_id=None, **changes):
    """The request with other sampling parameters."""
    if eos_id is not None:
        changes["stop_token_ids"] = (eos_id,)
    return dataclasses.replace(request, params=dataclasses.replace(request.params, **changes))


def engine_of(config, **options):
    return Engine(
        *load(config), **({"num_slots": SLOTS, "max_length": LENGTH, "prefill_chunk": CHUNK} | options)
    )


class Listener:
    """Collects the events of a request."""

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
    params = dataclasses.replace(
        request.params,
        # One number for most requests, which then share a program.
        max_new_tokens=max(NUM_NEW, request.params.max_new_tokens),
        stop_token_ids=(),
        with_routing=False,
    )
    ((row,),) = generate_in_chunks(*load(config), [request.prompt], params)
    num = request.params.max_new_tokens
    ends = request.params.stop_token_ids
    if ends and ends[0] in row.tokens:
        num = min(num, row.tokens.index(ends[0]) + 1)
    return list(row.tokens[:num]), list(row.logprobs[:num])


def assert_is_alone(config, request, listener):
    tokens, logprobs = alone(config, request)
    assert listener.text == tokens
    np.testing.assert_allclose([new.logprob for new in listener.tokens], logprobs, rtol=1e-5, atol=1e-5)
    assert listener.end == ("stop" if tokens[-1] in request.params.stop_token_ids else "length")


def prompt_of(length, seed=0):
    return tuple(np.random.default_rng(seed).integers(0, SMALL.vocab_size, length).tolist())
