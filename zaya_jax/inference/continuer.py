"""One prompt after another, as a conversation asks: of each only that is read which none before it had."""

from collections.abc import Iterator, Mapping, Sequence

from zaya_jax.inference.engine import (
    Engine,
    EngineStats,
    Event,
    Failed,
    Request,
    Ticket,
    Tokens,
)
from zaya_jax.inference.generate import Settings, cast_matrices
from zaya_jax.inference.prefixes import Prefixes
from zaya_jax.model.zaya import Zaya

CHUNK = 128
"""Tokens of a block that is remembered. What a turn reads again of the one before is less than one."""
REMEMBERED_BYTES = 2**30
"""24,000 tokens of ZAYA1-8B in bfloat16, with the states behind their blocks."""


class Continuer:
    """Continues a prompt, then the next one, and remembers how they began: `generate`'s texts, sooner."""

    def __init__(self, model: Zaya, variables: Mapping, *, chunk: int = CHUNK):
        """Takes no memory for texts yet.

        Args:
          model: the network.
          variables: its weights.
          chunk: tokens that are read, and remembered, at once.
        """
        self._model, self._variables = model, cast_matrices(model, variables)
        self._chunk = chunk
        self._engine: Engine | None = None
        self._prefixes = Prefixes(REMEMBERED_BYTES)
        self._ticket: Ticket | None = None

    def stats(self) -> EngineStats | None:
        """What its engine has done since texts became too long for the one before; None before the first."""
        return None if self._engine is None else self._engine.stats()

    def stream(self, prompt: Sequence[int], settings: Settings) -> Iterator[int]:
        """Continues a prompt and hands its tokens out as they come; a text before it that goes on ends.

        Args:
          prompt: its tokens.
          settings: how they are continued, on one device.

        Raises:
          ValueError: for a prompt or a setting that cannot be; at the call and not at the first token.
        """
        request = _request(prompt, settings)
        engine = self._engine_for(len(prompt) + request.max_new_tokens)
        if self._ticket is not None:
            self._ticket.cancel()
        events: list[Event] = []
        self._ticket = engine.submit(request, events.append)
        return self._tokens(engine, self._ticket, events)

    def _tokens(self, engine: Engine, ticket: Ticket, events: list[Event]) -> Iterator[int]:
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
            ticket.cancel()

    def _step(self, engine: Engine) -> None:
        try:
            engine.step()
        except BaseException:
            # Ctrl-C between the device's answer and our taking it would lose the rows' memory: another
            # engine has its own. What is remembered lies apart from it.
            self._engine = None
            raise

    def _engine_for(self, length: int) -> Engine:
        """The engine, or a roomier one that remembers the same."""
        if self._engine is not None and length <= self._engine.max_length:
            return self._engine
        longest = self._model.config.max_position_embeddings
        # In powers of two: a longer conversation has another program, and few of them.
        room = min(max(1 << (length - 1).bit_length(), self._chunk), longest)
        self._engine = Engine(
            self._model,
            self._variables,
            num_slots=1,
            max_length=room,
            prefill_chunk=self._chunk,
            prefixes=self._prefixes,
        )
        return self._engine


def _request(prompt: Sequence[int], settings: Settings) -> Request:
    (limit,) = settings.limits(1)
    assert settings.context_devices == 1, "rows of an engine lie on one device"
    assert isinstance(settings.seed, int), "one prompt has one seed"
    return Request(
        prompt=tuple(prompt),
        max_new_tokens=limit,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        eos_id=settings.eos_id,
    )
