"""Completions of texts and chats: a request is read, written and sent, until nobody wants more of it."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from starlette.types import Receive, Scope, Send

from zaya_jax.inference.prompt_scores import PromptScores
from zaya_jax.serving.answer_json import AnswerForm
from zaya_jax.serving.asked import AskedTexts
from zaya_jax.serving.choice_text import Delta, join
from zaya_jax.serving.exchange import ClientExchange
from zaya_jax.serving.limits import ServingLimits
from zaya_jax.serving.refusals import Gone, Refused, unavailable
from zaya_jax.serving.served import ServedRun
from zaya_jax.serving.service import Opened, Service
from zaya_jax.serving.writing import AnswerWriting, SlowReader

_LOG = logging.getLogger(__name__)
Read = Callable[[ServedRun, ServingLimits, bytes], AskedTexts]


class TextEndpoint:
    """An ASGI application that answers with texts."""

    def __init__(self, service: Service, read: Read):
        """Takes what makes of a body what is asked."""
        self._service, self._read = service, read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, and stops as soon as its client has left."""
        exchange = ClientExchange(scope, receive, send, self._service.limits)
        opened = self._service.opened
        body = await self._read_body(exchange)
        if body is None:
            return
        answering = asyncio.create_task(self._answer(exchange, opened, body))
        leaving = asyncio.create_task(exchange.gone())
        self._service.add(answering)
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                self._note("gone")
                answering.cancel()
            await answering
        except asyncio.CancelledError:
            # Of the answer, whose client has left; or this is cancelled itself, as a server does that ends.
            if not leaving.done():
                raise
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _read_body(self, exchange: ClientExchange) -> bytes | None:
        try:
            return await exchange.read_json()
        except Gone:
            return None

    async def _answer(self, exchange: ClientExchange, opened: Opened, body: bytes) -> None:
        """Answers, or says why not where that can still be said."""
        limits = self._service.limits
        try:
            async with asyncio.timeout(limits.request_seconds):
                await self._write(exchange, opened, body)
        except SlowReader:
            self._note("slow")
            exchange.abort()
        except TimeoutError:
            self._note("late")
            message = f"the answer was not whole after {limits.request_seconds:g} seconds"
            # To ask again would take as long: the word is for OpenAI's client, which would.
            headers = {"x-should-retry": "false"}
            error = Refused(message, status=504, kind="server_error", code="timeout", headers=headers)
            await self._refuse(exchange, error)
        except asyncio.CancelledError:
            if not self._service.is_ending:
                raise
            self._note("drained")
            await self._refuse(exchange, unavailable("the server ended before the answer was whole"))
        except Refused as error:
            await self._refuse(exchange, error)
        except Exception:
            _LOG.exception("an answer failed")
            message = "the server has a bug; its log has the traceback"
            await self._refuse(exchange, Refused(message, status=500, kind="server_error"))

    async def _refuse(self, exchange: ClientExchange, error: Refused) -> None:
        """Sends an error: as the response, or as the last event of one that has begun."""
        try:
            if exchange.status is None:
                await exchange.send_json(error.content, status=error.status, headers=error.headers)
            else:
                await exchange.send_event(error.content)
                await exchange.end_events(is_whole=False)
        except SlowReader:
            exchange.abort()

    async def _write(self, exchange: ClientExchange, opened: Opened, body: bytes) -> None:
        begun = time.monotonic()
        served, service = opened.served, self._service
        asked = await service.read(self._read, served, service.limits, body)
        kind = "chatcmpl" if asked.is_chat else "cmpl"
        answer_id = f"{kind}-{secrets.token_hex(12)}"
        form = AnswerForm(asked, served.name, opened.texts, answer_id, int(time.time()))
        answer = _Answer(service, exchange, form, begun)
        if max(asked.max_new_tokens) == 0:
            await answer.send_scores()
            return
        writing = AnswerWriting(served, asked, service.limits)
        writing.start()
        try:
            await (answer.stream(writing) if asked.is_streamed else answer.send_whole(writing))
        finally:
            writing.stop()

    def _note(self, why: str) -> None:
        self._service.metrics.cancelled.labels(why).inc()


class _Answer:
    """An answer on its way to its client."""

    def __init__(self, service: Service, exchange: ClientExchange, form: AnswerForm, begun: float):
        self._service, self._exchange, self._form = service, exchange, form
        self._begun, self._first = begun, None

    async def send_scores(self) -> None:
        """Of prompts that nothing follows."""
        asked = self._form.asked
        scores = await self._scores()
        deltas = [Delta(index, finish_reason="length") for index in range(asked.num_texts)]
        usage = self._form.usage(num_tokens=0, num_cached=0)
        if not asked.is_streamed:
            await self._send(deltas, scores, usage)
            return
        await self._exchange.begin_events()
        for delta in deltas:
            await self._send_chunk(delta, scores, is_first=True)
        await self._end(usage)

    async def send_whole(self, writing: AnswerWriting) -> None:
        """When all of it is there."""
        # The scores are computed while the engine writes.
        scoring = asyncio.create_task(self._scores())
        found: dict[int, list[Delta]] = {}
        try:
            async for deltas in writing.deltas():
                self._note_tokens()
                for delta in deltas:
                    found.setdefault(delta.index, []).append(delta)
            scores = await scoring
        finally:
            scoring.cancel()
        self._note_times(writing)
        usage = self._form.usage(num_tokens=writing.num_tokens, num_cached=writing.num_cached)
        await self._send([join(found[index]) for index in sorted(found)], scores, usage)

    async def stream(self, writing: AnswerWriting) -> None:
        """As it comes."""
        scores = await self._scores()
        await self._exchange.begin_events()
        begun: set[int] = set()
        async for deltas in writing.deltas():
            self._note_tokens()
            for delta in deltas:
                await self._send_chunk(delta, scores, is_first=delta.index not in begun)
                begun.add(delta.index)
        self._note_times(writing)
        await self._end(self._form.usage(num_tokens=writing.num_tokens, num_cached=writing.num_cached))

    async def _scores(self) -> list[PromptScores]:
        asked = self._form.asked
        if not asked.echoes or asked.num_top is None:
            return []
        return await self._service.score(asked.prompts, asked.num_top)

    async def _send(self, deltas: Sequence[Delta], scores: list[PromptScores], usage: dict) -> None:
        # The names and places of a long prompt's tokens take a while.
        content = await self._service.read(self._form.whole, deltas, scores, usage)
        await self._exchange.send_json(content)

    async def _send_chunk(self, delta: Delta, scores: list[PromptScores], *, is_first: bool) -> None:
        score = scores[delta.index // self._form.asked.num_choices] if scores else None
        if chunk := self._form.chunk(delta, is_first=is_first, scores=score):
            await self._exchange.send_event(chunk)

    async def _end(self, usage: dict) -> None:
        if self._form.asked.has_usage:
            await self._exchange.send_event(self._form.usage_chunk(usage))
        await self._exchange.end_events(is_whole=True)

    def _note_tokens(self) -> None:
        if self._first is None:
            self._first = time.monotonic()
            self._service.metrics.first_token_seconds.observe(self._first - self._begun)

    def _note_times(self, writing: AnswerWriting) -> None:
        now, asked = time.monotonic(), self._form.asked
        self._service.metrics.request_seconds.observe(now - self._begun)
        num_later = writing.num_tokens / asked.num_texts - 1
        if self._first is not None and num_later > 0:
            self._service.metrics.token_seconds.observe((now - self._first) / num_later)
