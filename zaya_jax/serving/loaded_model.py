"""A model that is loaded and ready to be served."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.inference.structured.compiler import GrammarCompiler
from zaya_jax.inference.tool_calls.markup import Markup


@runtime_checkable
class Cancellable(Protocol):
    """A submitted request of the engine.

    Attributes:
      num_cached: number of prompt tokens that the engine found in its prefix cache.
    """

    num_cached: int

    def cancel(self) -> None:
        """Frees the request's slot. May be called from any thread, and more than once."""
        ...


@runtime_checkable
class TextEngine(Protocol):
    """The part of `zaya_jax.inference.engine.engine.Engine` that the server uses. Tests have a fake one."""

    def submit(self, request: Any, on_event: Callable[[Any], None]) -> Cancellable:
        """Queues a request. `on_event` is called in another thread."""
        ...

    def stats(self) -> Any:
        """Returns how many requests run and wait, and the token counts since the start."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model with everything that is needed to serve it.

    Attributes:
      name: name of the model in requests.
      created: time of loading, in seconds since 1970.
      tokenizer: tokenizer of the model.
      chat_format: conversion of conversations to tokens; None if chats are not served.
      tool_markup: markup of the template's tool calls; None if tools are not supported.
      engine: engine that generates the texts.
      score: function of a prompt's tokens and a number k; returns the log-probability of each token, and the
        k most likely tokens at its position.
      vocab_size: vocabulary of the network, which may be larger than the tokenizer's.
      max_length: maximum number of tokens of a prompt and its continuation.
      num_layers: number of layers of the network.
      num_experts: number of experts per layer.
      capacity: maximum number of texts in the engine, running and waiting.
    """

    name: str
    created: int
    tokenizer: Tokenizer
    chat_format: ChatFormat | None
    engine: TextEngine
    score: Callable[[Sequence[int], int], PromptScores]
    vocab_size: int
    max_length: int
    num_layers: int
    num_experts: int
    capacity: int
    tool_markup: Markup | None = None

    @functools.cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiler of the grammars that constrain answers; it keeps those that it has compiled."""
        return GrammarCompiler(self.tokenizer, self.vocab_size)

    def to_json(self) -> dict[str, Any]:
        """Returns the model's entry in the list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "zaya_jax",
            # Clients of OpenAI's API ignore unknown fields; the chat page reads these.
            "zaya": {
                "num_layers": self.num_layers,
                "num_experts": self.num_experts,
                "max_length": self.max_length,
                "chat": self.chat_format is not None,
                "thinking": self.chat_format is not None and bool(self.chat_format.think_marks),
                "tools": self.tool_markup is not None,
            },
        }
