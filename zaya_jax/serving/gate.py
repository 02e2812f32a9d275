"""Who may ask at all: names of the host, the key, and headers that keep browsers from being used."""

import hmac
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from zaya_jax.serving.answer_json import to_bytes
from zaya_jax.serving.metrics import ServingMetrics
from zaya_jax.serving.page_files import HEADERS
from zaya_jax.serving.refusals import Refused

LOOPBACK = ("localhost", "127.0.0.1", "::1")
SECURITY_HEADERS = {**HEADERS, "X-Frame-Options": "DENY"}
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]


class Gate:
    """ASGI middleware: lets in who may, marks what goes out, counts what was answered."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        key: str | None,
        host: str,
        keyless: Collection[str],
        endpoints: Collection[str],
        metrics: ServingMetrics,
    ):
        """Takes what it guards.

        Args:
          app: the application behind it.
          key: that clients must send; None for none.
          host: that the server listens at.
          keyless: paths that need none.
          endpoints: paths that are counted by name; all others are one.
          metrics: where answers are counted.
        """
        self._app, self._metrics = app, metrics
        self._key = None if key is None else key.encode()
        self._host, self._keyless, self._endpoints = host, keyless, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hands a request on, or refuses it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        marked = self._marked(scope, send)
        try:
            self._check(scope)
        except Refused as error:
            await _send_refusal(error, marked)
            return
        await self._app(scope, receive, marked)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        # Another site may name its own host so that it leads here ("DNS rebinding"): to a browser this server
        # is then part of that site. A key, which such a page has not, is as good.
        if self._key is None and _host_of(headers.get(b"host", b"").decode("latin-1")) not in self._names:
            message = (
                "the Host header names another machine; a server without a key answers to loopback names"
            )
            raise Refused(message, status=403, kind="permission_error")
        if self._key is not None and scope["path"] not in self._keyless:
            scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
                raise Refused(
                    "this server needs its key, as Authorization: Bearer KEY",
                    status=401,
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    @property
    def _names(self) -> tuple[str, ...]:
        return (*LOOPBACK, self._host)

    def _marked(self, scope: Scope, send: Send) -> Callable[[MutableMapping[str, Any]], Any]:
        """A `send` that adds headers, and counts the response."""

        async def marked(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                given = list(message.get("headers", ()))
                names = {name.lower() for name, _ in given}
                message["headers"] = [*given, *(pair for pair in _HEADERS if pair[0] not in names)]
                # Others' paths would be metrics without end.
                endpoint = scope["path"] if scope["path"] in self._endpoints else "other"
                self._metrics.requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        return marked


def _host_of(header: str) -> str:
    """The name in a Host header, without its port."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower()


async def _send_refusal(error: Refused, send: Callable[[MutableMapping[str, Any]], Any]) -> None:
    body = to_bytes(error.content)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    # What was not read of the request is not worth reading.
    headers["connection"] = "close"
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
