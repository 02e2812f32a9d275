"""Streams the texts of one request from the engine's thread to the event loop."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence

from zaya_jax.errors import UserError
from zaya_jax.inference.engine.request import Event, Failed, Finished, QueueFull, Tokens
from zaya_jax.serving.api.answer_grammar import generation_error
from zaya_jax.serving.api.choice_text import ChoiceText, Delta, join
from zaya_jax.serving.api.request import CompletionRequest
from zaya_jax.serving.http.errors import ApiError, SlowClient, too_many, unavailable
from zaya_jax.serving.http.limits import ServingLimits
from zaya_jax.serving.loaded_model import Cancellable, LoadedModel


class AnswerStream:
    """The texts of a request while the engine generates them.

    Attributes:
      num_tokens: number of generated tokens so far, of all texts.
      num_cached: number of prompt tokens that the engine found in its prefix cache.
    """

    def __init__(self, model: LoadedModel, request: CompletionRequest, limits: ServingLimits):
        """Prepares the texts; `start` submits them to the engine."""
        self._engine, self._request = model.engine, request
        self._texts = [ChoiceText(model, request, index) for index in range(request.num_texts)]
        # The texts of a request share one queue, which may hold the events of all of them.
        self._max_unread = limits.unread_events * len(self._texts)
        self._submitted: list[Cancellable] = []
        self._unread: list[tuple[int, Event]] = []
        self._has_events = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_stopped = self._is_slow = False

    @property
    def num_tokens(self) -> int:
        """Number of generated tokens so far, of all texts."""
        return sum(text.num_tokens for text in self._texts)

    @property
    def num_cached(self) -> int:
        """Number of cached prompt tokens; a prompt counts once, however many texts it has."""
        return sum(each.num_cached for each in self._submitted[:: self._request.num_choices])

    def start(self) -> None:
        """Submits all texts to the engine, or none.

        Raises:
          ApiError: if the queue is full, or the engine has ended.
        """
        try:
            for index in range(len(self._texts)):
                on_event = functools.partial(self._on_event, index)
                self._submitted.append(self._engine.submit(self._request.to_engine(index), on_event))
        # Cancel the texts that were already submitted: a response never lacks some of its texts.
        except QueueFull as error:
            self.stop()
            raise too_many(f"{error}; retry in a moment") from None
        except RuntimeError as error:  # raised by an engine that has ended
            self.stop()
            raise unavailable(str(error)) from error
        except UserError as error:
            self.stop()
            raise ApiError(str(error)) from None

    def stop(self) -> None:
        """Cancels all texts; later events are ignored."""
        self._is_stopped = True
        # Free the memory now: the response task may end much later.
        self._unread.clear()
        for each in self._submitted:
            each.cancel()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """Yields the new parts of texts, at most one per text each time, until all texts have ended.

        Raises:
          ApiError: if the engine cannot finish a text.
          SlowClient: if more events are waiting than the limit allows, because the client does not read.
        """
        if self._request.reasoning_start:
            yield [text.begin() for text in self._texts]
        while any(text.finish_reason is None for text in self._texts):
            await self._has_events.wait()
            self._has_events.clear()
            # Raised here rather than in `_enqueue`, which runs outside the response's task.
            if self._is_slow:
                raise SlowClient
            # Take all waiting events at once: a slow client gets fewer and larger chunks.
            events, self._unread = self._unread, []
            if deltas := self._process(events):
                yield deltas

    def _on_event(self, index: int, event: Event) -> None:
        """Receives an event in the engine's thread."""
        # The loop is closed if the server shut down before the text ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._enqueue, index, event)

    def _enqueue(self, index: int, event: Event) -> None:
        if self._is_stopped:
            return
        self._unread.append((index, event))
        if len(self._unread) > self._max_unread:
            self._is_slow = True
            self.stop()
        self._has_events.set()

    def _process(self, events: Sequence[tuple[int, Event]]) -> list[Delta]:
        """Returns one joined delta for each text that has events."""
        deltas: dict[int, list[Delta]] = {}
        for index, event in events:
            deltas.setdefault(index, []).extend(self._deltas_of(self._texts[index], event))
        return [join(each) for each in deltas.values() if each]

    def _deltas_of(self, text: ChoiceText, event: Event) -> list[Delta]:
        # A text can end with a stop string while the engine has already generated more tokens.
        if text.finish_reason is not None:
            return []
        if isinstance(event, Failed):
            raise generation_error(event.error, self._request.grammar) from event.error
        if isinstance(event, Finished):
            raise unavailable(f"generation was stopped before the text was complete ({event.reason})")
        assert isinstance(event, Tokens), "there are no other events"
        deltas = []
        for new in event.new:
            deltas.append(text.add(new))
            if text.finish_reason is not None:
                # The engine does not know stop strings. Cancelling a text that it ended itself has no effect.
                self._submitted[text.index].cancel()
                break
        return deltas
