"""The texts of one request while the engine writes them: from its thread to the loop that sends them."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Sequence

from zaya_jax.inference.engine import Event, Failed, Finished, Full, Tokens
from zaya_jax.serving.asked import AskedTexts
from zaya_jax.serving.choice_text import ChoiceText, Delta, join
from zaya_jax.serving.limits import ServingLimits
from zaya_jax.serving.refusals import Refused, too_many, unavailable
from zaya_jax.serving.served import Cancellable, ServedRun


class SlowReader(Exception):
    """A client that did not take its answer while it was written."""


class AnswerWriting:
    """The texts of a request, on their way.

    Attributes:
      num_cached: tokens of its prompts that the engine had read before.
    """

    def __init__(self, served: ServedRun, asked: AskedTexts, limits: ServingLimits):
        """Begins nothing yet; `start` does."""
        self._engine, self._asked = served.engine, asked
        self._texts = [ChoiceText(served, asked, index) for index in range(asked.num_texts)]
        self._most_unread = limits.unread_events * len(self._texts)
        self._tickets: list[Cancellable] = []
        self._unread: list[tuple[int, Event]] = []
        self._arrived = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_over = self._is_slow = False

    @property
    def num_tokens(self) -> int:
        """Tokens that were written, of all texts."""
        return sum(text.num_tokens for text in self._texts)

    @property
    def num_cached(self) -> int:
        """Tokens of the prompts, each counted once, that the engine had read before."""
        firsts = self._tickets[:: self._asked.num_choices]
        return sum(ticket.num_cached for ticket in firsts)

    def start(self) -> None:
        """Asks the engine for all texts, or for none.

        Raises:
          Refused: if too many wait, or the engine has ended.
        """
        try:
            for index in range(len(self._texts)):
                on_event = functools.partial(self._hear, index)
                self._tickets.append(self._engine.submit(self._asked.request(index), on_event))
        except Full as error:
            self.stop()
            raise too_many(f"{error}; ask again in a moment") from None
        except RuntimeError as error:  # the engine's word for that it has ended
            self.stop()
            raise unavailable(str(error)) from error
        except ValueError as error:
            self.stop()
            raise Refused(str(error)) from None

    def stop(self) -> None:
        """Ends all texts; what comes of them from now on is nobody's."""
        self._is_over = True
        self._unread.clear()
        for ticket in self._tickets:
            ticket.cancel()

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What is new, of each text at most once, as often as there is something, until all have ended.

        Raises:
          Refused: if the engine cannot go on with a text.
          SlowReader: if more came than may wait for whoever reads here.
        """
        if self._asked.begun_thought:
            yield [text.begin() for text in self._texts]
        while any(text.finish_reason is None for text in self._texts):
            await self._arrived.wait()
            self._arrived.clear()
            if self._is_slow:
                raise SlowReader
            events, self._unread = self._unread, []
            if deltas := self._read(events):
                yield deltas

    def _hear(self, index: int, event: Event) -> None:
        """An event, in the engine's thread."""
        # The loop may be gone where a server ends in the middle of a text.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._take, index, event)

    def _take(self, index: int, event: Event) -> None:
        if self._is_over:
            return
        self._unread.append((index, event))
        if len(self._unread) > self._most_unread:
            self._is_slow = True
            self.stop()
        self._arrived.set()

    def _read(self, events: Sequence[tuple[int, Event]]) -> list[Delta]:
        """What events say, those of a text joined."""
        found: dict[int, list[Delta]] = {}
        for index, event in events:
            found.setdefault(index, []).extend(self._of_event(self._texts[index], event))
        return [join(deltas) for deltas in found.values() if deltas]

    def _of_event(self, text: ChoiceText, event: Event) -> list[Delta]:
        if text.finish_reason is not None:
            return []  # behind a stop string come the tokens that were under way
        if isinstance(event, Failed):
            # The sentence is of the network or the device, and holds nothing of the request.
            message = f"the text cannot go on: {event.error}"
            raise Refused(message, status=500, kind="server_error") from event.error
        if isinstance(event, Finished):
            raise unavailable(f"the text was ended ({event.reason}) before it was whole")
        assert isinstance(event, Tokens), "there are no others"
        deltas = []
        for new in event.new:
            deltas.append(text.add(new))
            if text.finish_reason is not None:
                # The engine knows no stop strings; of a text that it has ended itself this does nothing.
                self._tickets[text.index].cancel()
                break
        return deltas
