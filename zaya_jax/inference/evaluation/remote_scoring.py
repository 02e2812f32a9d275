"""Work that the processes of an evaluation share: requests to score, and prompts to continue."""

import contextlib
import dataclasses
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.inference.completion import complete
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.evaluation.device_pool import (
    AHEAD,
    DevicePool,
    DeviceWork,
    Replica,
    Workers,
    round_robin,
)
from zaya_jax.inference.evaluation.scoring import ScoringBatch
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.remote_work import coordinator, serve_work


@dataclasses.dataclass(frozen=True)
class PromptBatch:
    """A batch of prompts for one device.

    Attributes:
      prompts: token ids of each prompt.
      params: how all prompts are continued.
      tokenizer: tokenizer of the texts; each process has it.
    """

    kind: ClassVar[str] = "write"
    prompts: Sequence[Sequence[int]]
    params: SamplingParams
    tokenizer: Tokenizer

    def run(self, replica: Replica) -> list[str]:
        """Returns the continuation of each prompt."""
        # One batch at a time: the caches of two would take twice the memory.
        with replica.lock:
            completions = complete(
                replica.model, replica.variables, self.tokenizer, self.prompts, self.params
            )
        return [each.text for each in completions]

    def to_json(self) -> Any:
        """Returns the batch without the tokenizer."""
        prompts = [list(prompt) for prompt in self.prompts]
        return {"prompts": prompts, "params": dataclasses.asdict(self.params)}

    @classmethod
    def from_json(cls, values: Any, tokenizer: Tokenizer) -> "PromptBatch":
        """Returns the batch that `to_json` encoded."""
        return cls(values["prompts"], SamplingParams(**values["params"]), tokenizer)


@contextlib.contextmanager
def shared_workers(
    replicas: tuple[Replica, ...], tokenizer: Tokenizer, *, limit_seconds: float
) -> Iterator[Workers | None]:
    """Yields the devices of all processes in process 0. The others serve it until it is done, and yield None.

    Args:
      replicas: model on each device of this process.
      tokenizer: tokenizer of the texts.
      limit_seconds: timeout for messages of another process.

    Raises:
      PeerTimeout: if another process does not answer in time.
      CollectiveError: in all processes, if process 0 or a batch fails.
    """
    counts = hosts.gather("devices that compute", len(replicas))
    # A fresh name per session, so that messages of an earlier session in the same job cannot be mistaken
    # for new ones.
    name = hosts.broadcast_from_first("whose orders", uuid.uuid4().hex)
    if hosts.is_first():
        with coordinator(name, limit_seconds=limit_seconds) as work:
            yield Workers(replicas, round_robin(counts), work)
        return
    # The other processes serve work until process 0 ends the session, and raise its error if there is one.
    with DevicePool(replicas) as pool:
        serve_work(
            name,
            lambda message: pool.run(_decode_work(message, tokenizer)),
            # As many threads as process 0 has batches in flight here.
            num_threads=AHEAD * len(replicas),
        )
    yield None


def _decode_work(message: Any, tokenizer: Tokenizer) -> DeviceWork:
    """Decodes a message of `Workers`: the kind of the work, and its JSON value."""
    kind, values = message
    if kind == ScoringBatch.kind:
        return ScoringBatch.from_json(values)
    return PromptBatch.from_json(values, tokenizer)
