"""Limits on the size of requests and on every wait for a client."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """Limits of a server. Times are in seconds, and apply to one client or one request.

    Attributes:
      body_bytes: maximum size of a request body.
      unread_events: maximum number of events per text that wait for a client that does not read.
      scoring: maximum number of `echo` prompts that wait to be scored.
      client_connections: maximum number of open connections per client address. If it is reached, an idle
        connection of the client is closed in favor of a new one.
      header_seconds: time to receive the headers of a request.
      body_seconds: time to receive the body of a request.
      read_seconds: time to parse, validate and tokenize a body.
      idle_seconds: time that a connection may be open without a request.
      send_seconds: time for the client to read one part of a response.
      request_seconds: time from a request to the end of its response.
      drain_seconds: time for running responses to end after the first signal to shut down.
      forced_seconds: time from a second signal to the end of the process, whatever its threads do.
    """

    body_bytes: int = 1 << 20
    unread_events: int = 512
    scoring: int = 256
    client_connections: int = 1024
    header_seconds: float = 15.0
    body_seconds: float = 30.0
    read_seconds: float = 10.0
    idle_seconds: float = 30.0
    send_seconds: float = 30.0
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
    forced_seconds: float = 15.0
