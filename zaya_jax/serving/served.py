"""What a server gives: a run, its engine, and how its prompts are scored."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.prompt_scores import PromptScores


@runtime_checkable
class Cancellable(Protocol):
    """A request on its way, as the engine's tickets are.

    Attributes:
      num_cached: tokens of its prompt that the engine had read before.
    """

    num_cached: int

    def cancel(self) -> None:
        """Gives its slot back; may be called from any thread, and again."""
        ...


@runtime_checkable
class TextEngine(Protocol):
    """What the server asks of `zaya_jax.inference.engine.Engine`; a test has one of its own."""

    def submit(self, request: Any, on_event: Callable[[Any], None]) -> Cancellable:
        """Takes a request, whose events come from another thread."""
        ...

    def stats(self) -> Any:
        """How many run and wait, and what was done so far."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedRun:
    """A run that is served.

    Attributes:
      name: of the model, as clients ask for it.
      created: seconds since 1970, of when it was loaded.
      tokenizer: of the run.
      chat_format: how conversations become tokens; None for a run that knows none.
      engine: that writes.
      score: how likely the tokens of a prompt are, with so many likeliest ones beside each.
      vocab_size: of the network, which may be above the tokenizer's.
      max_length: tokens of a prompt and its answer.
      num_layers: of the network.
      num_experts: of each layer.
      num_places: requests that the engine takes at once, running and waiting.
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
    num_places: int

    def to_json(self) -> dict[str, Any]:
        """Its entry in the list of models."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "zaya_jax",
            "zaya": {
                "num_layers": self.num_layers,
                "num_experts": self.num_experts,
                "max_length": self.max_length,
                "chat": self.chat_format is not None,
                "thinking": self.chat_format is not None and bool(self.chat_format.think_marks),
            },
        }
