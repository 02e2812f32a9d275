"""Errors as OpenAI's interface has them: a status, and one sentence in JSON."""

from collections.abc import Mapping
from typing import Any


class Refused(Exception):
    """A request that is not answered, or not to its end.

    Attributes:
      status: of HTTP.
      headers: of the response.
      content: its JSON.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        field: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        """Says why.

        Args:
          message: one sentence.
          status: of HTTP.
          kind: OpenAI's `type` of the error.
          field: of the request that is wrong.
          code: OpenAI's name of the error, where it has one.
          headers: that the response shall have.
        """
        super().__init__(message)
        self.status, self.headers = status, dict(headers or {})
        self.content: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": field, "code": code}
        }


class Gone(Exception):
    """Nobody is there any more to whom something could be said."""


def unavailable(message: str, *, seconds: int = 1) -> Refused:
    """What is refused now and may be asked again after some seconds."""
    headers = {"Retry-After": str(seconds)}
    return Refused(message, status=503, kind="server_error", code="unavailable", headers=headers)


def too_many(message: str) -> Refused:
    """What is refused because others wait already."""
    headers = {"Retry-After": "1"}
    return Refused(message, status=429, kind="rate_limit_error", code="queue_full", headers=headers)
