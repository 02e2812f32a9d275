"""HTTP/1.1 connections: uvicorn's, with a limit on the time for headers, and the ability to abort."""

import asyncio
import socket
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from zaya_jax.serving.api.response import to_bytes
from zaya_jax.serving.http.errors import too_many
from zaya_jax.serving.http.limits import ServingLimits
from zaya_jax.serving.http.open_connections import OpenConnections

SEND_BYTES = 256 * 1024
"""Send buffer of a connection in the kernel, which doubles it for its bookkeeping."""


class Connection(H11Protocol):
    """A connection whose client must send its requests and read its responses in time.

    uvicorn limits how long a connection stays open after a response, but not how long a request may take to
    arrive. A client that sends a byte per minute would keep its connection for ever.

    Attributes:
      limits: limits of the server. They are set in a subclass, because uvicorn creates the instances.
      open_connections: open connections of the server, set in the same subclass.
    """

    limits: ServingLimits
    open_connections: OpenConnections

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        """Passes `abort` to the application, in the state of each request."""
        # ASGI has no message to abort a connection, so that the function is passed in the state.
        super().__init__(config, server_state, {**app_state, "abort": self.abort}, _loop)
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:  # pyright: ignore
        """Admits the connection, or refuses it if its client has too many."""
        super().connection_made(transport)  # pyright: ignore[reportArgumentType]
        if not self.open_connections.admit(self, self.client[0] if self.client else None):
            # Refuse before reading any request: reading one would cost what the limit is meant to save.
            self.transport.write(_too_many_connections(self.open_connections.per_client))
            self.transport.close()
            return
        # By default Linux would buffer megabytes before this process noticed that a client does not read.
        if (own := transport.get_extra_info("socket")) is not None:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BYTES)
        self._update_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timer, and removes the connection from the open ones."""
        self._stop_timer()
        self.open_connections.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Processes received bytes, and waits for the rest of incomplete headers."""
        super().data_received(data)
        self._update_timer()

    def send_400_response(self, msg: str) -> None:
        """Reports a request that is not HTTP; aborts if a response has already been sent in part."""
        # A second status line within a response would corrupt it for the client.
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.abort()

    def on_response_complete(self) -> None:
        """Ends a request; if the connection is closing, limits the time to read the rest of the response."""
        super().on_response_complete()
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self.loop.call_later(self.limits.send_seconds, self.abort)
        self._update_idle()

    def timeout_keep_alive_handler(self) -> None:
        """Closes an idle connection, also one whose client has not read its last response."""
        if self.transport.get_write_buffer_size():
            self.abort()
        else:
            super().timeout_keep_alive_handler()

    def abort(self) -> None:
        """Closes the connection at once, without sending the rest."""
        # `close` would first wait until all is sent, which never ends if the client does not read.
        self.transport.abort()

    def _update_idle(self) -> None:
        # A pipelined request may already be waiting when a response is complete.
        is_answered = self.cycle is None or self.cycle.response_complete
        self.open_connections.set_idle(self, is_idle=is_answered and self.conn.their_state is h11.IDLE)

    def _update_timer(self) -> None:
        self._update_idle()
        # h11 is IDLE until the headers of a request are complete, also between two requests.
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timer()
        elif self._header_timer is None:
            self._header_timer = self.loop.call_later(self.limits.header_seconds, self.abort)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def _too_many_connections(per_client: int) -> bytes:
    """Returns the raw response to a client that has too many connections."""
    error = too_many(f"this client has too many busy connections; the maximum is {per_client}")
    body = to_bytes(error.content)
    headers = {
        **error.headers,
        "Connection": "close",
        "Content-Type": "application/json",
        "Content-Length": len(body),
    }
    # Written by hand, because uvicorn can only respond to a request, and none was read.
    lines = ["HTTP/1.1 429 Too Many Requests", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
