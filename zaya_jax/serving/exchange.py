"""Bytes to and from one client, with a limit on every wait for it."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.types import Receive, Scope, Send

from zaya_jax.serving.answer_json import to_bytes
from zaya_jax.serving.limits import ServingLimits
from zaya_jax.serving.refusals import Gone, Refused
from zaya_jax.serving.writing import SlowReader

PART_BYTES = 1 << 16
CLOSE = {"Connection": "close"}
"""Of answers to requests that were not read to their end: what is left of them is not worth reading."""


class ClientExchange:
    """A request whose body is read, and its response.

    Attributes:
      status: of the response; None before it begins.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: ServingLimits):
        """Reads nothing yet."""
        self._scope, self._receive, self._send, self._limits = scope, receive, send, limits
        self.status: int | None = None

    async def read_json(self) -> bytes:
        """The body of a request that says it is JSON.

        Raises:
          Refused: if it says something else, is too long or too slow.
          Gone: if nobody sends any more.
        """
        headers = dict(self._scope["headers"])
        # A page of another site may have a browser send plain text here without asking; not this type.
        if headers.get(b"content-type", b"").split(b";")[0].strip().lower() != b"application/json":
            message = "the content type must be application/json"
            raise Refused(message, status=415, headers=CLOSE)
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._limits.body_bytes:
            raise self._too_long()
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                return await self._read()
        except TimeoutError:
            message = f"the body was not there after {self._limits.body_seconds:g} seconds"
            raise Refused(message, status=408, headers=CLOSE) from None

    async def _read(self) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            body += message.get("body", b"")
            if len(body) > self._limits.body_bytes:
                raise self._too_long()
            if not message.get("more_body", False):
                return bytes(body)

    def _too_long(self) -> Refused:
        message = f"the body may have {self._limits.body_bytes:,} bytes"
        return Refused(message, status=413, headers=CLOSE)

    async def gone(self) -> None:
        """Waits until the client has left; the body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def send_json(
        self, content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        """Sends a whole response of JSON."""
        body = to_bytes(content)
        await self._begin(status, {"Content-Type": "application/json", **(headers or {})}, len(body))
        # In parts, each of which must be taken in time: a long answer is not cut off while its client reads.
        for first in range(0, len(body), PART_BYTES):
            await self._send_part(body[first : first + PART_BYTES], more=True)
        await self._send_part(b"", more=False)

    async def begin_events(self) -> None:
        """Begins a stream of server-sent events."""
        # For proxies: they must hand on each part as it comes.
        headers = {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-cache",
            "X-Accel-Buffering": "no",
        }
        await self._begin(200, headers, None)

    async def send_event(self, content: Any) -> None:
        """Sends an event of JSON."""
        await self._send_part(b"data: " + to_bytes(content) + b"\n\n", more=True)

    async def end_events(self, *, is_whole: bool) -> None:
        """Ends the stream; only one that is whole has OpenAI's mark behind it."""
        await self._send_part(b"data: [DONE]\n\n" if is_whole else b"", more=False)

    async def _begin(self, status: int, headers: Mapping[str, str], length: int | None) -> None:
        self.status = status
        sized = {} if length is None else {"Content-Length": str(length)}
        pairs = [(name.lower().encode(), value.encode()) for name, value in {**headers, **sized}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def _send_part(self, body: bytes, *, more: bool) -> None:
        """Sends, and waits while the client has too much that it did not read.

        Raises:
          SlowReader: if it reads nothing for too long.
        """
        try:
            async with asyncio.timeout(self._limits.send_seconds):
                await self._send({"type": "http.response.body", "body": body, "more_body": more})
        except TimeoutError:
            raise SlowReader from None

    def abort(self) -> None:
        """Closes the connection at once, with what was not read of it."""
        if abort := self._scope.get("state", {}).get("abort"):
            abort()
