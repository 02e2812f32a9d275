"""Requests of the engine, the events that answer them, and the engine's statistics."""

import dataclasses
import threading
from collections.abc import Callable

from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.engine.sequence import NewToken, Reason


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
      prompt: token ids.
      params: how the prompt is continued. The text is that of `zaya_jax.generate` with the same parameters,
        whatever else the engine runs.
    """

    prompt: tuple[int, ...]
    params: SamplingParams


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The next tokens of a text."""

    new: tuple[NewToken, ...]


@dataclasses.dataclass(frozen=True)
class Finished:
    """The text is complete; no event follows."""

    reason: Reason


@dataclasses.dataclass(frozen=True)
class Failed:
    """The text cannot be continued; no event follows."""

    error: Exception


Event = Tokens | Finished | Failed
OnEvent = Callable[[Event], object]


class QueueFull(Exception):
    """The queue of waiting requests is full; a new request is rejected before its prompt takes memory."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """Load of an engine, and counters since it started.

    Attributes:
      running: number of requests that have a row.
      waiting: number of requests that wait for a row.
      free_slots: number of rows without a request.
      tokens_prefilled: number of prompt tokens that the model read.
      tokens_from_prefixes: number of prompt tokens that were copied from the prefix cache.
      tokens_generated: number of generated tokens.
      prefix_bytes: size of the prefix cache in bytes.
    """

    running: int
    waiting: int
    free_slots: int
    tokens_prefilled: int
    tokens_from_prefixes: int
    tokens_generated: int
    prefix_bytes: int


class RequestHandle:
    """A submitted request.

    Attributes:
      request: the request.
      on_event: function that receives its events.
      num_cached: number of prompt tokens that came from the prefix cache.
    """

    def __init__(self, request: Request, on_event: OnEvent):
        self.request, self.on_event = request, on_event
        self._cancelled = threading.Event()
        self.num_cached = 0

    def cancel(self) -> None:
        """Ends the text at the next step. Any thread may call it; a text that has ended stays as it is."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether the request was cancelled."""
        return self._cancelled.is_set()
