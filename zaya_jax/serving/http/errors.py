"""Errors of the HTTP API: a status, and a JSON object in the form of OpenAI or Anthropic."""

from collections.abc import Mapping
from typing import Any

MESSAGES_PATH = "/v1/messages"
"""Path of Anthropic's Messages API, whose errors have another form."""
_ANTHROPIC_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors by HTTP status; others are invalid requests, or errors of the server."""


class ApiError(Exception):
    """An error that is sent to the client, as the response or as the last event of a stream.

    Attributes:
      status: HTTP status.
      headers: additional response headers.
      content: JSON content of the response, in OpenAI's form.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """Builds the content.

        Args:
          message: what is wrong, and how to fix it.
          status: HTTP status.
          kind: OpenAI's `type` of the error.
          param: name of the wrong field of the request.
          code: OpenAI's `code` of the error, if it has one.
          headers: additional response headers.
        """
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.content: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }

    def content_of(self, path: str) -> dict[str, Any]:
        """Returns the JSON content in the form of the API that a path belongs to."""
        if not path.startswith(MESSAGES_PATH):
            return self.content
        # Anthropic's errors have neither a code nor the name of a field.
        other = "api_error" if self.status >= 500 else "invalid_request_error"
        kind = _ANTHROPIC_KINDS.get(self.status, other)
        return {"type": "error", "error": {"type": kind, "message": str(self)}}


class ClientDisconnected(Exception):
    """The client closed its connection, so that nothing can be sent to it."""


class SlowClient(Exception):
    """The client did not read its response for too long, while it was generated or sent."""


def unavailable(message: str, *, seconds: int = 1) -> ApiError:
    """Returns the error of a request that may succeed some seconds later."""
    # OpenAI's clients wait for this time before they retry.
    headers = {"Retry-After": str(seconds)}
    return ApiError(message, status=503, kind="server_error", code="unavailable", headers=headers)


def too_many(message: str) -> ApiError:
    """Returns the error of a request that exceeds the limit of a queue."""
    # The queue drains within a second or two at usual loads.
    headers = {"Retry-After": "1"}
    return ApiError(message, status=429, kind="rate_limit_error", code="queue_full", headers=headers)
