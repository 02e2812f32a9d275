"""What the processes of an evaluation have each other compute: requests to score, and prompts to continue."""

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.completion import Completion, complete
from zaya_jax.inference.generate import Settings
from zaya_jax.inference.scoring import ScoringBatch
from zaya_jax.inference.workers import AHEAD, Desk, DeviceWork, Replica, Workers, deal
from zaya_jax.parallel import hosts
from zaya_jax.parallel.orders import giving_orders, obey


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts, for one device.

    Attributes:
      prompts: tokens of each.
      settings: how they are continued, alike for all.
      stop: strings before which a text is cut.
      tokenizer: that made the prompts; each process has it.
      last_id: a token behind which nothing of a text counts, whatever else ends one.
    """

    kind: ClassVar[str] = "write"
    prompts: Sequence[Sequence[int]]
    settings: Settings
    stop: Sequence[str]
    tokenizer: Tokenizer
    last_id: int | None = None

    def run(self, replica: Replica) -> list[str]:
        """The text of each prompt."""
        # Two batches' caches at a time would be twice the memory.
        with replica.lock:
            found = complete(
                replica.model,
                replica.variables,
                self.tokenizer,
                self.prompts,
                self.settings,
                stop=self.stop,
            )
        return [self._text(each) for each in found]

    def _text(self, completion: Completion) -> str:
        tokens = completion.tokens
        if self.last_id == self.settings.eos_id or self.last_id not in tokens:
            return completion.text
        before = self.tokenizer.decode(tokens[: tokens.index(self.last_id)])
        # Both begin the same text: a stop string may have cut it before.
        return min(before, completion.text, key=len)

    def to_json(self) -> Any:
        """All of it but the tokenizer."""
        return {
            "prompts": [list(prompt) for prompt in self.prompts],
            "settings": dataclasses.asdict(self.settings),
            "stop": list(self.stop),
            "last_id": self.last_id,
        }

    @classmethod
    def from_json(cls, said: Any, tokenizer: Tokenizer) -> "PromptBatch":
        """What `to_json` said, as a batch again."""
        settings = Settings(**said["settings"])
        return cls(said["prompts"], settings, said["stop"], tokenizer, said["last_id"])


@contextlib.contextmanager
def shared_workers(
    replicas: tuple[Replica, ...], tokenizer: Tokenizer, *, limit_seconds: float
) -> Iterator[Workers | None]:
    """The devices of all processes for process 0; the others, when they have computed its all, get None.

    Args:
      replicas: the network on the devices of this process.
      tokenizer: of texts; each process has it.
      limit_seconds: the longest wait for another process.

    Raises:
      Late: if another process says nothing for so long.
      Shared: in all, for what process 0 or a batch has failed with.
    """
    counts = hosts.gather("devices that compute", len(replicas))
    name = hosts.from_first("whose orders", uuid.uuid4().hex)
    if hosts.is_first():
        with giving_orders(name, limit_seconds=limit_seconds) as orders:
            yield Workers(replicas, deal(counts), orders)
        return
    with Desk(replicas) as desk:
        obey(
            name,
            lambda order: desk.run(_work_of(order, tokenizer)),
            num_threads=AHEAD * len(replicas),
            limit_seconds=limit_seconds,
        )
    yield None


def _work_of(order: Any, tokenizer: Tokenizer) -> DeviceWork:
    """The work that `Workers` ordered: its kind and what its `to_json` said."""
    kind, said = order
    return (
        ScoringBatch.from_json(said) if kind == ScoringBatch.kind else PromptBatch.from_json(said, tokenizer)
    )
