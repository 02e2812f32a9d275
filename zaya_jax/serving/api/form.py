"""The form of an API: how its requests are read, and its responses and errors are written."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.serving.api.choice_text import Delta
from zaya_jax.serving.api.request import CompletionRequest
from zaya_jax.serving.api.token_texts import TokenTexts
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.loaded_model import LoadedModel

ReadRequest = Callable[[LoadedModel, bytes], CompletionRequest]


@runtime_checkable
class Builder(Protocol):
    """Builds the JSON of one response, complete or in events."""

    @property
    def request(self) -> CompletionRequest:
        """The request that the response answers."""
        ...

    def usage(self, *, num_tokens: int, num_cached: int) -> dict[str, Any]:
        """Returns the counts of generated tokens, and of prompt tokens found in the prefix cache."""
        ...

    def complete(
        self, deltas: Sequence[Delta], scores: Sequence[PromptScores], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Returns a complete response of one delta per text."""
        ...

    def begin(self) -> list[dict[str, Any]]:
        """Returns the events of a stream that precede the first text."""
        ...

    def events(self, delta: Delta, *, is_first: bool, scores: PromptScores | None) -> list[dict[str, Any]]:
        """Returns the events of a new part of a text."""
        ...

    def end(self, usage: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the events that follow the last text."""
        ...


@dataclasses.dataclass(frozen=True)
class ApiForm:
    """One API of the server.

    Attributes:
      read_request: function that validates a body.
      make_builder: function of a request, the model's name and the texts of tokens.
      error_event: function of an error and the number of events before it; returns the last event of a
        stream that failed.
      names_events: whether events are named by their field "type".
      end_mark: data of the event that ends a complete stream; empty for none.
    """

    # A function of the module: the server has threads for each one, by its identity.
    read_request: ReadRequest
    make_builder: Callable[[CompletionRequest, str, TokenTexts], Builder]
    error_event: Callable[[ApiError, int], dict[str, Any]]
    names_events: bool = True
    end_mark: str = ""
