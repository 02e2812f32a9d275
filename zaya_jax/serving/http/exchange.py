"""One request and its response, with a limit on every wait for the client."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from zaya_jax.serving.api.response import to_bytes
from zaya_jax.serving.http.errors import ApiError, ClientDisconnected, SlowClient
from zaya_jax.serving.http.limits import ServingLimits

PART_BYTES = 1 << 16
CLOSE = {"Connection": "close"}
"""Headers of the error for a request whose body was not fully read, so that the rest is not read either."""


class HttpExchange:
    """Receives the body of a request and sends its response.

    Attributes:
      status: HTTP status of the response; None until the response begins.
      num_events: number of events that were sent.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ServingLimits):
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self.status: int | None = None
        self.num_events = 0

    async def read_json(self) -> bytes:
        """Returns the body of a request whose content type is JSON.

        Raises:
          ApiError: if the content type is another, or the body is too long or too slow.
          ClientDisconnected: if the client disconnects before the end of the body.
        """
        headers = dict(self._scope["headers"])
        # Browsers let a page send plain text to other servers without asking these first, but not JSON.
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            raise ApiError("the content type must be application/json", status=415, headers=CLOSE)
        declared = headers.get(b"content-length", b"0")
        # Check the declared length before reading. Python refuses to convert numbers of thousands of digits.
        if declared.isdigit() and int(declared[:20]) > self._limits.body_bytes:
            raise self._too_long()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._read()
        except TimeoutError:
            message = f"the body was not received within {self._limits.body_seconds:g} seconds"
            raise ApiError(message, status=408, headers=CLOSE) from None

    async def _read(self) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            # Without this check, an incomplete body would count as complete.
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body += message.get("body", b"")
            if len(body) > self._limits.body_bytes:
                raise self._too_long()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_long(self) -> ApiError:
        message = f"the body is too long; the maximum is {self._limits.body_bytes:,} bytes"
        return ApiError(message, status=413, headers=CLOSE)

    async def wait_for_disconnect(self) -> None:
        """Waits until the client disconnects. The body must have been read before."""
        # uvicorn sends no other message after the body, but ASGI allows empty ones.
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(
        self, content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a complete JSON response.

        Raises:
          SlowClient: if the client does not read a part of it in time.
        """
        body = to_bytes(content)
        await self._begin(status, {"Content-Type": "application/json", **(headers or {})}, len(body))
        # The time limit applies to each part: a long response is not aborted while its client reads.
        for first in range(0, len(body), PART_BYTES):
            await self._send_part(body[first : first + PART_BYTES], more=True)
        await self._send_part(b"", more=False)

    async def send_error(self, error: ApiError) -> None:
        """Sends an error as the response.

        Raises:
          SlowClient: if the client does not read a part of it in time.
        """
        content = error.content_of(self._scope["path"])
        await self.send_json(content, status=error.status, headers=error.headers)

    async def begin_events(self) -> None:
        """Begins a stream of server-sent events."""
        # nginx and similar proxies would otherwise buffer the events.
        headers = {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
        await self._begin(200, headers, None)

    async def send_event(self, content: dict[str, Any], *, has_name: bool = False) -> None:
        """Sends a server-sent event with JSON data.

        Args:
          content: the data.
          has_name: whether the event's name is the field "type" of its data.

        Raises:
          SlowClient: if the client does not read it in time.
        """
        self.num_events += 1
        name = f"event: {content['type']}\n".encode() if has_name else b""
        await self._send_part(name + b"data: " + to_bytes(content) + b"\n\n", more=True)

    async def end_events(self, mark: str = "") -> None:
        """Ends the stream, with a mark if its API has one for complete streams."""
        # OpenAI's clients treat a stream of chunks without the end mark as interrupted.
        await self._send_part(f"data: {mark}\n\n".encode() if mark else b"", more=False)

    async def _begin(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        self.status = status
        # A stream has no length: HTTP/1.1 sends it in chunks, and the last chunk marks its end.
        sized = {} if length is None else {"Content-Length": str(length)}
        pairs = [(name.lower().encode(), value.encode()) for name, value in {**headers, **sized}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _send_part(self, body: bytes, *, more: bool) -> None:
        # `send` waits while the client has too much unread data.
        try:
            async with asyncio.timeout(self._limits.send_seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise SlowClient from None

    def abort(self) -> None:
        """Closes the connection at once, without sending the rest."""
        if abort := self._scope.get("state", {}).get("abort"):
            abort()
