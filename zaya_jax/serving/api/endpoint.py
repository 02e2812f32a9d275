"""Endpoints for completions and chats: read a request, generate texts, and send the response."""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Sequence

from starlette.types import Receive, Scope, Send

from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.serving.api.choice_text import Delta, join
from zaya_jax.serving.api.form import ApiForm, Builder
from zaya_jax.serving.generation_stream import AnswerStream
from zaya_jax.serving.http.errors import ApiError, ClientDisconnected, SlowClient, unavailable
from zaya_jax.serving.http.exchange import HttpExchange
from zaya_jax.serving.service import ReadyState, Service

_LOG = logging.getLogger(__name__)


class TextEndpoint:
    """ASGI application of one endpoint that generates texts."""

    def __init__(self, service: Service, form: ApiForm):
        """Creates an endpoint.

        Args:
          service: state of the server.
          form: form of its requests and responses.
        """
        self._service, self._form = service, form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles a request, and cancels it as soon as its client disconnects."""
        exchange = HttpExchange(scope, receive, send, self._service.limits)
        ready = self._service.ready_state
        try:
            body = await exchange.read_json()
        except ClientDisconnected:
            return
        response = asyncio.create_task(self._respond(exchange, ready, body))
        # Watch the connection during the response: a client that has left must not keep a slot.
        disconnect = asyncio.create_task(exchange.wait_for_disconnect())
        self._service.add(response)
        try:
            await asyncio.wait({response, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if not response.done():
                self._count_cancelled("gone")
                response.cancel()
            await response
        except asyncio.CancelledError:
            # Expected if the client disconnected. Otherwise the server itself cancels this task.
            if not disconnect.done():
                raise
        finally:
            # Wait for both tasks to end, so that neither outlives the request.
            for task in (response, disconnect):
                task.cancel()
            await asyncio.gather(response, disconnect, return_exceptions=True)

    async def _respond(self, exchange: HttpExchange, ready: ReadyState, body: bytes) -> None:
        """Sends the response, or an error if that is still possible."""
        limits = self._service.limits
        try:
            async with asyncio.timeout(limits.request_seconds):
                await self._generate(exchange, ready, body)
        except SlowClient:
            self._count_cancelled("slow")
            exchange.abort()
        except TimeoutError:
            self._count_cancelled("late")
            message = f"the response was not complete after {limits.request_seconds:g} seconds"
            # OpenAI's client retries after a 504 unless this header forbids it. A retry would take as long.
            headers = {"x-should-retry": "false"}
            error = ApiError(message, status=504, kind="server_error", code="timeout", headers=headers)
            await self._send_error(exchange, error)
        except asyncio.CancelledError:
            if not self._service.is_shutting_down:
                raise
            self._count_cancelled("drained")
            error = unavailable("the server shut down before the response was complete")
            await self._send_error(exchange, error)
        except ApiError as error:
            await self._send_error(exchange, error)
        except Exception:
            # The client must not see a traceback, which can contain other requests and paths.
            _LOG.exception("a request failed")
            message = "internal error; the server's log has the traceback"
            await self._send_error(exchange, ApiError(message, status=500, kind="server_error"))

    async def _send_error(self, exchange: HttpExchange, error: ApiError) -> None:
        """Sends an error as the response, or as the last event of a stream that has begun."""
        try:
            # After the status line was sent, an error can only be an event.
            if exchange.status is None:
                await exchange.send_error(error)
            else:
                event = self._form.error_event(error, exchange.num_events)
                await exchange.send_event(event, has_name=self._form.names_events)
                await exchange.end_events()
        except SlowClient:
            exchange.abort()

    async def _generate(self, exchange: HttpExchange, ready: ReadyState, body: bytes) -> None:
        start = time.monotonic()
        model, service = ready.model, self._service
        request = await service.read(self._form.read_request, body)
        if request.grammar is not None:
            compiled = await service.compile(request.grammar, is_chat=request.is_chat)
            request = dataclasses.replace(request, constraint=compiled)
        builder = self._form.make_builder(request, model.name, ready.texts)
        response = _Response(service, exchange, self._form, builder, start)
        # `max_tokens: 0` with `echo` requests the scores of the prompts, and nothing is generated.
        if max(request.max_new_tokens) == 0:
            await response.send_scores()
            return
        stream = AnswerStream(model, request, service.limits)
        stream.start()
        try:
            await (response.send_stream(stream) if request.is_streamed else response.send_complete(stream))
        finally:
            stream.stop()

    def _count_cancelled(self, reason: str) -> None:
        self._service.metrics.cancelled.labels(reason).inc()


class _Response:
    """Sends one response, and measures its times."""

    def __init__(
        self, service: Service, exchange: HttpExchange, form: ApiForm, builder: Builder, start: float
    ):
        self._service, self._exchange, self._form, self._builder = service, exchange, form, builder
        self._start, self._first_token = start, None

    async def send_scores(self) -> None:
        """Sends the scores of prompts for which nothing is generated."""
        request = self._builder.request
        scores = await self._scores()
        deltas = [Delta(index, finish_reason="length") for index in range(request.num_texts)]
        usage = self._builder.usage(num_tokens=0, num_cached=0)
        if not request.is_streamed:
            await self._send(deltas, scores, usage)
            return
        await self._begin()
        for delta in deltas:
            await self._send_part(delta, scores, is_first=True)
        await self._end(usage)

    async def send_complete(self, stream: AnswerStream) -> None:
        """Sends the response when all texts are complete."""
        # The prompts are scored while the engine generates.
        scoring = asyncio.create_task(self._scores())
        parts: dict[int, list[Delta]] = {}
        try:
            async for deltas in stream.deltas():
                self._note_first_token()
                for delta in deltas:
                    parts.setdefault(delta.index, []).append(delta)
            scores = await scoring
        finally:
            scoring.cancel()
        self._observe_times(stream)
        usage = self._builder.usage(num_tokens=stream.num_tokens, num_cached=stream.num_cached)
        await self._send([join(parts[index]) for index in sorted(parts)], scores, usage)

    async def send_stream(self, stream: AnswerStream) -> None:
        """Sends the response in events while the texts are generated."""
        scores = await self._scores()
        await self._begin()
        started: set[int] = set()
        async for deltas in stream.deltas():
            self._note_first_token()
            for delta in deltas:
                await self._send_part(delta, scores, is_first=delta.index not in started)
                started.add(delta.index)
        self._observe_times(stream)
        await self._end(self._builder.usage(num_tokens=stream.num_tokens, num_cached=stream.num_cached))

    async def _scores(self) -> list[PromptScores]:
        request = self._builder.request
        if not request.echoes or request.num_top is None:
            return []
        return await self._service.score(request.prompts, request.num_top)

    async def _send(self, deltas: Sequence[Delta], scores: list[PromptScores], usage: dict) -> None:
        # The names and offsets of a long prompt's tokens take too long for the event loop.
        content = await self._service.build(self._builder.complete, deltas, scores, usage)
        await self._exchange.send_json(content)

    async def _begin(self) -> None:
        await self._exchange.begin_events()
        await self._send_events(self._builder.begin())

    async def _send_part(self, delta: Delta, scores: list[PromptScores], *, is_first: bool) -> None:
        score = scores[delta.index // self._builder.request.num_choices] if scores else None
        await self._send_events(self._builder.events(delta, is_first=is_first, scores=score))

    async def _end(self, usage: dict) -> None:
        await self._send_events(self._builder.end(usage))
        await self._exchange.end_events(self._form.end_mark)

    async def _send_events(self, events: Sequence[dict]) -> None:
        for event in events:
            await self._exchange.send_event(event, has_name=self._form.names_events)

    def _note_first_token(self) -> None:
        if self._first_token is None:
            self._first_token = time.monotonic()
            self._service.metrics.first_token_seconds.observe(self._first_token - self._start)

    def _observe_times(self, stream: AnswerStream) -> None:
        now, request = time.monotonic(), self._builder.request
        self._service.metrics.request_seconds.observe(now - self._start)
        # The first token is excluded: its time includes waiting for a slot and the prefill.
        num_later = stream.num_tokens / request.num_texts - 1
        if self._first_token is not None and num_later > 0:
            self._service.metrics.token_seconds.observe((now - self._first_token) / num_later)
