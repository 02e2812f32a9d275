"""State of a server: its status, its model, and the responses in progress."""

import asyncio
import collections
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.inference.structured.constraint import Constraint
from zaya_jax.serving.api.answer_grammar import AnswerGrammar, compile_constraint
from zaya_jax.serving.api.token_texts import TokenTexts
from zaya_jax.serving.http.body_structure import check_structure
from zaya_jax.serving.http.errors import ApiError, too_many, unavailable
from zaya_jax.serving.http.limits import ServingLimits
from zaya_jax.serving.http.worker_threads import WorkerThreads
from zaya_jax.serving.loaded_model import LoadedModel
from zaya_jax.serving.metrics import ServingMetrics

Status = Literal["loading", "ready", "draining", "failed"]
T = TypeVar("T")
NUM_THREADS = 2
"""Threads that read small bodies, and threads that build responses: a long response takes a second."""
SMALL_BODY_BYTES = 1 << 14
"""Bodies up to this size have separate threads, so that they do not wait for large bodies."""
_UNAVAILABLE = {
    "loading": "the server is still loading its model",
    "draining": "the server is shutting down and accepts no more requests",
    "failed": "the engine has failed; restart the server",
}
"""Error messages by status."""


@dataclasses.dataclass(frozen=True)
class ReadyState:
    """What requests use once the model is loaded.

    Attributes:
      model: the model.
      texts: names and bytes of its tokens.
      failure: function that returns the error that ended the engine; None while the engine works.
    """

    model: LoadedModel
    texts: TokenTexts
    failure: Callable[[], Exception | None]


class Service:
    """State that all requests of a server share. Only the event loop may use it.

    Attributes:
      limits: limits of all requests.
      metrics: metrics of the server.
      is_shutting_down: whether running responses are being cancelled.
    """

    def __init__(self, limits: ServingLimits, metrics: ServingMetrics | None = None):
        """Starts with the status "loading"."""
        self.limits, self.metrics = limits, metrics or ServingMetrics()
        self._ready: ReadyState | None = None
        self._is_draining = self.is_shutting_down = False
        self._responses: set[asyncio.Task] = set()
        self._num_scoring = 0
        # Each endpoint has its own threads: chats whose template hangs must not block completions. Large
        # bodies are read one at a time, because they compete with the event loop for Python's lock.
        self._small_readers: dict[object, WorkerThreads] = collections.defaultdict(
            lambda: WorkerThreads(NUM_THREADS, "small-reader")
        )
        self._large_readers: dict[object, WorkerThreads] = collections.defaultdict(
            lambda: WorkerThreads(1, "large-reader")
        )
        self._response_builders = WorkerThreads(NUM_THREADS, "response-builder")
        # A schema that takes seconds to compile delays only other schemas that are not compiled yet.
        self._grammar_compilers = WorkerThreads(NUM_THREADS, "grammar-compiler")
        # Scores one prompt at a time: the device also runs the engine, and a prompt's logits take memory.
        self._scorer = concurrent.futures.ThreadPoolExecutor(1, "scorer")

    def set_ready(self, model: LoadedModel, failure: Callable[[], Exception | None] = lambda: None) -> None:
        """Accepts requests from now on.

        Args:
          model: the loaded model.
          failure: function that returns the error that ended the engine, if any.
        """
        self._ready = ReadyState(model, TokenTexts(model.tokenizer), failure)
        # The metrics of the engine appear only now: while loading there is no engine to read.
        self.metrics.watch(model.engine.stats)

    def close(self) -> None:
        """Stops the scoring thread, and drops the prompts that wait for it."""
        self._scorer.shutdown(wait=False, cancel_futures=True)

    @property
    def status(self) -> Status:
        """Whether the server can answer requests now."""
        if self._is_draining:
            return "draining"
        if self._ready is None:
            return "loading"
        return "ready" if self._ready.failure() is None else "failed"

    @property
    def ready_state(self) -> ReadyState:
        """The loaded model.

        Raises:
          ApiError: if the server cannot answer requests now.
        """
        status = self.status
        if status != "ready" or self._ready is None:
            raise unavailable(_UNAVAILABLE[status], seconds=5)
        return self._ready

    @property
    def num_responses(self) -> int:
        """Number of responses in progress."""
        return len(self._responses)

    def add(self, response: asyncio.Task) -> None:
        """Registers a response, for which `drain` waits."""
        self._responses.add(response)
        response.add_done_callback(self._responses.discard)

    async def drain(self, seconds: float) -> int:
        """Refuses new requests, waits for running responses, and cancels those that take longer.

        Args:
          seconds: how long to wait.

        Returns:
          Number of cancelled responses.
        """
        self._is_draining = True
        if self._responses:
            await asyncio.wait(self._responses, timeout=seconds)
        self.is_shutting_down = True
        unfinished = list(self._responses)
        for response in unfinished:
            response.cancel()
        # Each of them still sends its client an error.
        if unfinished:
            await asyncio.wait(unfinished, timeout=5)
        return len(unfinished)

    async def read(self, read: Callable[[LoadedModel, bytes], T], body: bytes) -> T:
        """Parses and validates a body in a thread, within the time limit.

        Args:
          read: function that returns a request from a body.
          body: JSON of the request.

        Raises:
          ApiError: if the body is too deep or too large, takes too long, or `read` refuses it.
        """
        limits, model = self.limits, self.ready_state.model
        is_small = len(body) <= SMALL_BODY_BYTES
        threads = (self._small_readers if is_small else self._large_readers)[read]

        def check_and_read() -> T:
            # The check takes milliseconds for a large body, too long for the event loop.
            check_structure(body, max_body_bytes=limits.body_bytes)
            return read(model, body)

        try:
            async with asyncio.timeout(limits.read_seconds):
                return await threads.call(check_and_read)
        except TimeoutError:
            message = f"the body could not be read within {limits.read_seconds:g} seconds; split the request"
            raise ApiError(message, status=503, kind="server_error", code="timeout") from None

    async def compile(self, answer: AnswerGrammar, *, is_chat: bool) -> Constraint:
        """Compiles the grammar of an answer in a thread, within the time limit.

        Args:
          answer: grammar of the answer.
          is_chat: whether the model may think before the answer.

        Raises:
          ApiError: if the grammar is refused, or waits too long for others.
        """
        model, seconds = self.ready_state.model, self.limits.read_seconds
        compile_one = functools.partial(compile_constraint, model, answer, is_chat=is_chat)
        try:
            async with asyncio.timeout(seconds):
                return await self._grammar_compilers.call(compile_one)
        except TimeoutError:
            message = f"the schema could not be compiled within {seconds:g} seconds; retry in a moment"
            raise ApiError(
                message, status=503, kind="server_error", code="timeout", param=answer.param
            ) from None

    async def build(self, function: Callable[..., T], *arguments: object) -> T:
        """Builds the content of a response, which may be long, in a thread."""
        return await self._response_builders.call(function, *arguments)

    async def score(self, prompts: Sequence[Sequence[int]], num_top: int) -> list[PromptScores]:
        """Scores prompts, after those that are already waiting.

        Args:
          prompts: tokens of each prompt.
          num_top: number of most likely tokens to report in the place of each token.

        Raises:
          ApiError: if too many prompts are waiting.
        """
        # All prompts of a request are queued, or none.
        if self._num_scoring + len(prompts) > self.limits.scoring:
            raise too_many(f"{self._num_scoring} prompts wait to be scored; retry in a moment")
        self._num_scoring += len(prompts)
        try:
            run = functools.partial(asyncio.get_running_loop().run_in_executor, self._scorer)
            # One `gather` for all prompts: if one is cancelled, the others also leave the queue.
            score = self.ready_state.model.score
            return list(await asyncio.gather(*(run(score, prompt, num_top) for prompt in prompts)))
        finally:
            self._num_scoring -= len(prompts)
