"""How much a client may ask, and how long it may take over it: no request is without a bound."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """What a server allows. All seconds are of waiting on one client, or for one request.

    Attributes:
      body_bytes: of a request.
      messages: of a conversation.
      texts: that one request may be answered with: prompts times `n`.
      stop_strings: of a request.
      stop_characters: of a stop string.
      unread_events: of one text, that wait for a client that does not read.
      scoring: prompts of `echo` that wait for their turn.
      header_seconds: until a request's headers are there.
      body_seconds: until its body is there.
      idle_seconds: that a connection may stay open between two requests.
      send_seconds: until a part of an answer is taken.
      request_seconds: until an answer is whole.
      drain_seconds: for which a server that was asked to end goes on with what runs.
    """

    body_bytes: int = 1 << 20
    messages: int = 1000
    texts: int = 128
    stop_strings: int = 16
    stop_characters: int = 256
    unread_events: int = 512
    scoring: int = 256
    header_seconds: float = 15.0
    body_seconds: float = 30.0
    idle_seconds: float = 30.0
    send_seconds: float = 30.0
    request_seconds: float = 600.0
    drain_seconds: float = 30.0
