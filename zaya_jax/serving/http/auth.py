"""Authentication of requests, protection against requests of hostile web pages, and security headers."""

import hmac
from collections.abc import Callable, Collection, MutableMapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from zaya_jax.platform.host_header import is_allowed
from zaya_jax.serving.api.response import to_bytes
from zaya_jax.serving.http.errors import ApiError
from zaya_jax.serving.http.page_files import HEADERS
from zaya_jax.serving.metrics import ServingMetrics

SECURITY_HEADERS = {**HEADERS, "X-Frame-Options": "DENY"}
_HEADERS = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]


class AuthMiddleware:
    """ASGI middleware that checks the key and Host header, adds security headers and counts responses."""

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
        """Wraps an application.

        Args:
          app: the application.
          key: key that clients must send; None for none.
          host: host that the server listens on.
          keyless: paths that need no key.
          endpoints: paths that are counted by name; all others are counted together.
          metrics: metrics of the server.
        """
        self._app, self._metrics = app, metrics
        self._key = None if key is None else key.encode()
        self._host, self._keyless, self._endpoints = host, keyless, endpoints

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes an allowed request to the application, and answers others with an error."""
        # Other types, such as "lifespan", come from the server itself and not from a client.
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        send = self._wrap(scope, send)
        try:
            self._check(scope)
        except ApiError as error:
            await _send_error(error, scope["path"], send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        # A web page can reach a loopback server by DNS rebinding, but it does not know the key: with a key,
        # any Host header is safe.
        if self._key is None and not is_allowed(host, [self._host]):
            message = "the Host header names another machine; without a key, only loopback names are allowed"
            raise ApiError(message, status=403, kind="permission_error")
        if self._key is not None and scope["path"] not in self._keyless:
            # Anthropic's clients send the key in another header.
            default = b"Bearer " + headers.get(b"x-api-key", b"")
            scheme, _, key = headers.get(b"authorization", default).partition(b" ")
            # compare_digest takes the same time for any wrong key, so that none can be guessed by its timing.
            if scheme.lower() != b"bearer" or not hmac.compare_digest(key.strip(), self._key):
                raise ApiError(
                    "this server requires its key, in the header Authorization: Bearer KEY",
                    status=401,
                    kind="authentication_error",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )

    def _wrap(self, scope: Scope, send: Send) -> Callable[[MutableMapping[str, Any]], Any]:
        """Returns a `send` that adds the security headers and counts the response."""

        async def wrapped(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                headers = list(message.get("headers", ()))
                names = {name.lower() for name, _ in headers}
                message["headers"] = [*headers, *(pair for pair in _HEADERS if pair[0] not in names)]
                # Clients choose paths freely: a label for each would be an unlimited number of time series.
                endpoint = scope["path"] if scope["path"] in self._endpoints else "other"
                self._metrics.requests.labels(endpoint, str(message["status"])).inc()
            await send(message)

        return wrapped


async def _send_error(error: ApiError, path: str, send: Callable[[MutableMapping[str, Any]], Any]) -> None:
    body = to_bytes(error.content_of(path))
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    # The body of the request was not read. Closing the connection is cheaper than reading it.
    headers["connection"] = "close"
    pairs = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
