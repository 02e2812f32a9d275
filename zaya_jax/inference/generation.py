"""What the engine is asked, what it answers, and how far a text is.

Letters: L layers.
"""

import dataclasses
import threading
from collections.abc import Callable
from typing import Literal

from zaya_jax.config import ModelConfig
from zaya_jax.inference.sampling import Sampling
from zaya_jax.inference.slots import MOST_TOP_LOGPROBS

Reason = Literal["stop", "length", "cancelled"]
"""Why a text ended: its end token, its limit, or nobody wanted more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """A prompt, and how it is continued.

    Attributes:
      prompt: tokens.
      max_new_tokens: the longest continuation.
      temperature: divides the logits; 0 takes the likeliest token.
      top_p: draws from the smallest set of likeliest tokens that reaches this probability.
      top_k: draws from this many likeliest tokens.
      seed: of the draws; the text is that of `zaya_jax.generate` with the same seed, whatever runs beside it.
      eos_id: the token that ends the text; None for none.
      num_top_logprobs: likeliest tokens that are told beside each chosen one.
      with_routing: whether tokens are told with their experts.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 0.0
    top_p: float | None = None
    top_k: int | None = None
    seed: int = 0
    eos_id: int | None = None
    num_top_logprobs: int = 0
    with_routing: bool = False

    def __post_init__(self):
        Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)  # refuses what cannot be
        if not self.prompt:
            raise ValueError("the prompt is empty; it must have at least one token")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2**32 - 1")
        if not 0 <= self.num_top_logprobs <= MOST_TOP_LOGPROBS:
            raise ValueError(
                f"num_top_logprobs is {self.num_top_logprobs}; it must be from 0 to {MOST_TOP_LOGPROBS}"
            )

    def check(self, config: ModelConfig, max_length: int) -> None:
        """Sees to it that a network can continue the prompt, in a slot of so many tokens.

        Raises:
          ValueError: for a token that is not in the vocabulary, or a text that is too long.
        """
        size = config.vocab_size
        for position, token in enumerate(self.prompt):
            if not 0 <= token < size:
                raise ValueError(
                    f"token {token} at position {position} of the prompt is outside the vocabulary of "
                    f"{size}; it must be from 0 to {size - 1}"
                )
        if self.eos_id is not None and not 0 <= self.eos_id < size:
            raise ValueError(
                f"eos_id is {self.eos_id}; it must be a token of the vocabulary, from 0 to {size - 1}, or "
                "None"
            )
        if len(self.prompt) + self.max_new_tokens > max_length:
            raise ValueError(
                f"the prompt has {len(self.prompt)} tokens and max_new_tokens is {self.max_new_tokens}; "
                f"together they must not exceed {max_length}, which is as much as there is room for"
            )


@dataclasses.dataclass(frozen=True)
class NewToken:
    """A token of a text.

    Attributes:
      token: its number.
      logprob: natural logarithm of the probability that the network gave it: of its own distribution,
        before temperature, `top_k` and `top_p`.
      top: the likeliest tokens in its place with theirs, likeliest first, as many as were asked for.
      experts_L: of each layer the class that its router gave this token when the network read it; None
        unless asked for, and of an end token, which nobody reads.
      probabilities_L: what its router gave that class.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    experts_L: tuple[int, ...] | None = None
    probabilities_L: tuple[float, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The next tokens of a text."""

    new: tuple[NewToken, ...]


@dataclasses.dataclass(frozen=True)
class Finished:
    """A text is whole; no event follows."""

    reason: Reason


@dataclasses.dataclass(frozen=True)
class Failed:
    """A text cannot go on; no event follows."""

    error: Exception


Event = Tokens | Finished | Failed
OnEvent = Callable[[Event], object]


class Full(Exception):
    """Too many requests wait; one must be refused before its prompt takes memory."""


@dataclasses.dataclass(frozen=True)
class EngineStats:
    """What an engine does, and has done since it began.

    Attributes:
      running: requests that have a slot.
      waiting: requests that wait for one.
      free_slots: slots that nobody has.
      tokens_prefilled: tokens of prompts that the network read.
      tokens_from_prefixes: tokens of prompts that it had read before.
      tokens_generated: new tokens.
      prefix_bytes: memory of what it keeps of earlier texts.
    """

    running: int
    waiting: int
    free_slots: int
    tokens_prefilled: int
    tokens_from_prefixes: int
    tokens_generated: int
    prefix_bytes: int


class Ticket:
    """A request on its way.

    Attributes:
      num_cached: tokens of its prompt that need not be read, for an earlier one began so.
    """

    def __init__(self, request: Request, on_event: OnEvent):
        """Notes who hears of it."""
        self.request, self.on_event = request, on_event
        self._cancelled = threading.Event()
        self.num_cached = 0

    def cancel(self) -> None:
        """Ends the text at the next step, from any thread; nothing happens to one that has ended."""
        self._cancelled.set()

    @property
    def is_cancelled(self) -> bool:
        """Whether anybody has ended it."""
        return self._cancelled.is_set()


class RunningText:
    """How far a request is that has a row.

    Attributes:
      ticket: the request's.
      row: of the cache.
      tokens: the prompt and what was chosen so far.
      length: tokens that the row has read.
      num_new: tokens that were chosen.
      names: of the whole blocks among those that were read.
      reason: why it has ended; None while it goes on.
    """

    def __init__(self, ticket: Ticket, row: int):
        """Begins with a prompt that was not read."""
        self.ticket, self.row = ticket, row
        self.tokens = list(ticket.request.prompt)
        self.length, self.num_new = 0, 0
        self.names: list[bytes] = []
        self.reason: Reason | None = None
        self._ready: list[NewToken] = []
        self._unread: NewToken | None = None

    @property
    def request(self) -> Request:
        """What was asked with the ticket."""
        return self.ticket.request

    @property
    def is_reading(self) -> bool:
        """Whether some of its prompt is left to read."""
        return self.length < len(self.request.prompt)

    @property
    def steps_left(self) -> int:
        """Steps that it takes at most: one more than new tokens, if the last one's experts are told."""
        return self.request.max_new_tokens - self.num_new + self.request.with_routing

    def read(self, experts_L: list[int], probabilities_L: list[float]) -> None:
        """Notes that its newest token was read, and where the routers sent it."""
        self.length += 1
        if self._unread is not None:
            routing = {"experts_L": tuple(experts_L), "probabilities_L": tuple(probabilities_L)}
            self._ready.append(dataclasses.replace(self._unread, **routing))
            self._unread = None

    def choose(self, new: NewToken) -> None:
        """Takes its next token, unless it has all."""
        if self.num_new == self.request.max_new_tokens:  # the step was for the last one's experts
            self.reason = "length"
            return
        self.tokens.append(new.token)
        self.num_new += 1
        is_end = new.token == self.request.eos_id
        if self.request.with_routing and not is_end:
            self._unread = new
        else:
            self._ready.append(new)
        if is_end:
            self.reason = "stop"
        elif self.steps_left == 0:
            self.reason = "length"

    def take_ready(self) -> tuple[NewToken, ...]:
        """The tokens of which all is known, each once."""
        ready, self._ready = tuple(self._ready), []
        return ready
