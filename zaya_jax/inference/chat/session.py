"""A chat session: successive prompts of one conversation, each prefilled only where it is new."""

from collections.abc import Iterator, Mapping, Sequence

from zaya_jax.inference.engine.decoder import cast_matrices
from zaya_jax.inference.engine.engine import Engine
from zaya_jax.inference.engine.prefix_cache import PrefixCache
from zaya_jax.inference.engine.request import EngineStats, Event, Failed, Request, RequestHandle, Tokens
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.model.zaya import Zaya

CHUNK = 128
"""Tokens of a block of the prefix cache. A turn computes less than one block of the previous one again."""
PREFIX_BYTES = 2**30
"""Size of the prefix cache: 24,000 tokens of ZAYA1-8B in bfloat16, with the states after their blocks."""


class ChatSession:
    """Continues one prompt after another with the texts of `generate`, reusing their common prefixes."""

    def __init__(self, model: Zaya, variables: Mapping, *, chunk: int = CHUNK):
        """Creates a session; the first prompt allocates its cache.

        Args:
          model: the model.
          variables: its weights.
          chunk: tokens per prefill, and of a block of the prefix cache.
        """
        self._model, self._variables = model, cast_matrices(model, variables)
        self._chunk = chunk
        self._engine: Engine | None = None
        self._prefixes = PrefixCache(PREFIX_BYTES)
        self._handle: RequestHandle | None = None

    def stats(self) -> EngineStats | None:
        """Returns the statistics of the current engine; None before the first prompt."""
        return None if self._engine is None else self._engine.stats()

    def stream(self, prompt: Sequence[int], params: SamplingParams) -> Iterator[int]:
        """Continues a prompt and yields its tokens; a text that is still being generated is cancelled.

        Args:
          prompt: token ids.
          params: how the prompt is continued.

        Raises:
          UserError: for an invalid prompt; at the call and not at the first token.
        """
        engine = self._engine_for(len(prompt) + params.max_new_tokens)
        if self._handle is not None:
            # The engine has one slot: an abandoned answer would block the next one.
            self._handle.cancel()
        # The engine is stepped in this thread, so that a list suffices and no event is lost.
        events: list[Event] = []
        self._handle = engine.submit(Request(tuple(prompt), params), events.append)
        return self._tokens(engine, self._handle, events)

    def _tokens(self, engine: Engine, handle: RequestHandle, events: list[Event]) -> Iterator[int]:
        try:
            while True:
                for event in events:
                    if isinstance(event, Failed):
                        raise event.error
                    if not isinstance(event, Tokens):
                        return
                    yield from (new.token for new in event.new)
                events.clear()
                self._step(engine)
        finally:
            # Also if the caller stops reading early: the only slot must become free.
            handle.cancel()

    def _step(self, engine: Engine) -> None:
        try:
            engine.step()
        except BaseException:
            # Ctrl-C between the device's answer and its assignment loses the donated cache. The next prompt
            # gets another engine; the prefix cache has its own memory and remains.
            self._engine = None
            raise

    def _engine_for(self, length: int) -> Engine:
        """Returns the engine, or a new one with a longer cache and the same prefix cache."""
        if self._engine is not None and length <= self._engine.max_length:
            return self._engine
        # In powers of two, so that a growing conversation compiles few programs.
        max_length = max(1 << (length - 1).bit_length(), self._chunk)
        self._engine = Engine(
            self._model,
            self._variables,
            num_slots=1,
            max_length=min(max_length, self._model.config.max_position_embeddings),
            prefill_chunk=self._chunk,
            prefixes=self._prefixes,
        )
        return self._engine
