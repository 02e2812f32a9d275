"""The state of a server: whether it can answer, what it serves, who is being answered."""

import asyncio
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from zaya_jax.inference.prompt_scores import PromptScores
from zaya_jax.serving.limits import ServingLimits
from zaya_jax.serving.metrics import ServingMetrics
from zaya_jax.serving.refusals import too_many, unavailable
from zaya_jax.serving.served import ServedRun
from zaya_jax.serving.token_texts import TokenTexts

Status = Literal["loading", "ready", "draining", "failed"]
T = TypeVar("T")
READERS = 2
"""Threads that read bodies: a megabyte of letters takes a tokenizer of Python a second."""


@dataclasses.dataclass(frozen=True)
class Opened:
    """What there is once a run is loaded."""

    served: ServedRun
    texts: TokenTexts
    failure: Callable[[], Exception | None]
    """What ended the engine; None while it goes on."""


class Service:
    """What all requests of a server share. It belongs to the loop that answers them.

    Attributes:
      limits: of all requests.
      metrics: what was done.
      is_ending: whether what still runs is ended in the middle.
    """

    def __init__(self, limits: ServingLimits, metrics: ServingMetrics | None = None):
        """Begins as one that loads."""
        self.limits, self.metrics = limits, metrics or ServingMetrics()
        self._opened: Opened | None = None
        self._is_draining = self.is_ending = False
        self._answers: set[asyncio.Task] = set()
        self._num_scoring = 0
        self._readers = concurrent.futures.ThreadPoolExecutor(READERS, "reader")
        # One at a time: the device is the engine's, and a prompt's logits take memory.
        self._scorer = concurrent.futures.ThreadPoolExecutor(1, "scorer")

    def open(self, served: ServedRun, failure: Callable[[], Exception | None] = lambda: None) -> None:
        """Has requests answered from now on.

        Args:
          served: the run.
          failure: gives what ended the engine, if anything did.
        """
        self._opened = Opened(served, TokenTexts(served.tokenizer), failure)
        self.metrics.watch(served.engine.stats)

    def close(self) -> None:
        """Lets its threads go; what they have not begun is dropped."""
        for pool in (self._readers, self._scorer):
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def status(self) -> Status:
        """Whether it can answer now."""
        if self._is_draining:
            return "draining"
        if self._opened is None:
            return "loading"
        return "ready" if self._opened.failure() is None else "failed"

    @property
    def opened(self) -> Opened:
        """What it serves.

        Raises:
          Refused: if it cannot answer now.
        """
        status = self.status
        if status != "ready" or self._opened is None:
            sentences = {
                "loading": "the server is still loading its run",
                "draining": "the server is ending, and takes no more requests",
                "failed": "the engine has failed; the server must be started anew",
            }
            raise unavailable(sentences[status], seconds=5)
        return self._opened

    @property
    def num_answering(self) -> int:
        """Requests that are being answered."""
        return len(self._answers)

    def add(self, answer: asyncio.Task) -> None:
        """Notes an answer, which is waited for before the server ends."""
        self._answers.add(answer)
        answer.add_done_callback(self._answers.discard)

    async def drain(self, seconds: float) -> int:
        """Takes no more requests, and waits until those that run are answered, or for so long.

        Returns:
          How many were ended in the middle.
        """
        self._is_draining = True
        if self._answers:
            await asyncio.wait(self._answers, timeout=seconds)
        self.is_ending = True
        left = list(self._answers)
        for answer in left:
            answer.cancel()
        if left:
            await asyncio.wait(left, timeout=5)
        return len(left)

    async def read(self, function: Callable[..., T], *arguments: object) -> T:
        """Calls what may take long for a large body, beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *arguments)

    async def score(self, prompts: Sequence[Sequence[int]], num_top: int) -> list[PromptScores]:
        """Scores prompts, behind those that wait already.

        Raises:
          Refused: if too many wait.
        """
        if self._num_scoring + len(prompts) > self.limits.scoring:
            raise too_many(f"{self._num_scoring} prompts wait to be scored; ask again in a moment")
        self._num_scoring += len(prompts)
        try:
            run = functools.partial(asyncio.get_running_loop().run_in_executor, self._scorer)
            # gather and not one by one: a cancelled one takes its others with it out of the queue.
            score = self.opened.served.score
            return list(await asyncio.gather(*(run(score, prompt, num_top) for prompt in prompts)))
        finally:
            self._num_scoring -= len(prompts)
