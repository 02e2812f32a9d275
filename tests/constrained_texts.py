"""A small random model over bytes, and texts of it that follow a grammar."""

import dataclasses
import functools
import unittest.mock

import jax
import jax.numpy as jnp
from small_models import EXECUTION, SMALL

from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.inference.engine.engine import Engine
from zaya_jax.inference.engine.request import Failed, Finished, Request, Tokens
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.structured import compiler as compiler_module
from zaya_jax.inference.structured.compiler import GrammarCompiler
from zaya_jax.inference.structured.grammar import json_schema_grammar
from zaya_jax.model.zaya import Zaya

TOKENIZER = load_tokenizer("byte-chat")
VOCAB_SIZE = 272
"""Larger than the tokenizer's, as vocabularies that are padded, and no multiple of 32."""
EOS = TOKENIZER.eos_id
END, THINK, THINK_END = (TOKENIZER.special_ids[name] for name in ("<|im_end|>", "<think>", "</think>"))
CONFIG = dataclasses.replace(SMALL, vocab_size=VOCAB_SIZE, max_position_embeddings=8192)
COMPILER = GrammarCompiler(TOKENIZER, VOCAB_SIZE)
PROMPT = tuple(TOKENIZER.encode("Answer in JSON: "))


@functools.cache
def load():
    model = Zaya(CONFIG, EXECUTION)
    return model, jax.jit(model.init)(jax.random.key(3), jnp.zeros((1, 4), jnp.int32))


def new_engine(**options):
    return Engine(*load(), **({"num_slots": 4, "max_length": 640, "prefill_chunk": 16} | options))


@functools.cache
def engine():
    """The engine that all tests of a file share."""
    return new_engine()


def constraint_of(schema, think_ids=None):
    # These schemas are harmless: save the process that tries each.
    with unittest.mock.patch.object(compiler_module, "check_in_process"):
        return COMPILER.compile(json_schema_grammar(schema), think_ids)


def request_of(constraint=None, prompt=PROMPT, **params):
    params = {"max_new_tokens": 400, "temperature": 1.0, "stop_token_ids": (EOS, END)} | params
    return Request(tuple(prompt), SamplingParams(constraint=constraint, **params))


@dataclasses.dataclass
class Answer:
    """Everything that an engine sent about a request."""

    new: list = dataclasses.field(default_factory=list)
    end: str | None = None
    error: Exception | None = None

    def __call__(self, event):
        if isinstance(event, Tokens):
            self.new += event.new
        elif isinstance(event, Finished):
            self.end = event.reason
        else:
            assert isinstance(event, Failed)
            self.end, self.error = "failed", event.error

    @property
    def tokens(self):
        return [each.token for each in self.new]

    @property
    def text(self):
        return TOKENIZER.decode(self.tokens)


def run_all(of_engine, requests):
    answers = [Answer() for _ in requests]
    for request, answer in zip(requests, answers, strict=True):
        of_engine.submit(request, answer)
    while of_engine.step():
        pass
    return answers
