"""HTTP/1.1 of one connection: uvicorn's, with a limit on headers that do not come, and a way to hang up."""

import asyncio
import socket
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from zaya_jax.serving.limits import ServingLimits

SEND_BYTES = 256 * 1024
"""Of an answer that may be on their way to a client; the kernel takes twice as much with its own notes."""


class Connection(H11Protocol):
    """A connection whose client must send a request in time, and must read its answer.

    uvicorn limits how long a connection is kept open behind a response; not how long the first request, or
    half of one, may take. One that sends a letter a minute would hold it for ever.
    """

    limits = ServingLimits()
    """A server has a class of its own with its limits: uvicorn makes the instances."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Begins as uvicorn's does; the application finds in its state how to hang up."""
        super().__init__(config, server_state, {**app_state, "abort": self._abort}, _loop)
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # pyright: ignore
        """Waits for headers from now on."""
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        # Linux would let what a client does not read grow to megabytes before anybody here saw it wait.
        if (own := transport.get_extra_info("socket")) is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._watch_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Waits for nothing any more."""
        self._forget_deadline()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Takes what came, and waits for the rest of the headers if that is not all."""
        super().data_received(data)
        self._watch_headers()

    def send_400_response(self, msg: str) -> None:
        """Says that this is not HTTP; where an answer is on its way already, hangs up."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self._abort()

    def on_response_complete(self) -> None:
        """Ends an exchange; where the connection ends too, what is left must be taken in time."""
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.loop.call_later(self.limits.send_seconds, self._abort)

    def timeout_keep_alive_handler(self) -> None:
        """Ends an idle connection, also one whose client has not read its last answer."""
        if self.transport.get_write_buffer_size():
            self._abort()
        else:
            super().timeout_keep_alive_handler()

    def _watch_headers(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._forget_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.limits.header_seconds, self._abort)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _abort(self) -> None:
        # Not close, which first waits until all is sent: some clients read nothing, and nothing ever is.
        self.transport.abort()
