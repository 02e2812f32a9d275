"""The process that renders chat templates from elsewhere, which are code and may run forever.

Reads requests from standard input, and writes a reply for each chat as soon as it is rendered. Both are lines
of JSON. The process ends when its input ends. The kernel kills it when a chat takes too long,
even within a single C call. Excessive memory is an error of the chat.
"""

import dataclasses
import json
import resource
import signal
import sys
from collections.abc import Mapping
from typing import Any

from zaya_jax.data.chats.templates.jinja_environment import marks_generation, render

MAX_MEMORY_BYTES = 1 << 30
"""Address space of the process in bytes; Python and Jinja need about 50 MB of it."""
MAX_TEXT = 1 << 26
"""Maximum number of characters of a rendered chat."""
MAX_MESSAGE = 500
"""Maximum number of characters of an error message from a template."""


def as_line(value: Any) -> bytes:
    """Returns a value as a line of JSON, which has no line break within it."""
    return json.dumps(value).encode() + b"\n"


def answer(request: Mapping[str, Any], chat: Mapping[str, Any] | None) -> dict[str, Any]:
    """Renders a chat or inspects the template; returns the result or an error message.

    Args:
      request: request with the field `template`.
      chat: chat to render; None inspects the template.
    """
    try:
        if chat is None:
            return {"marks_generation": marks_generation(request["template"])}
        rendered = render(request["template"], chat)
    except MemoryError:
        return {"error": "it takes more than 1 GiB of memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    # The template is code, and may raise any exception.
    except Exception as error:
        return {"error": sentence_of(error)}
    if len(rendered.text) > MAX_TEXT:
        return {"error": f"it writes {len(rendered.text):,} characters; a chat may have {MAX_TEXT:,}"}
    return dataclasses.asdict(rendered)


def sentence_of(error: Exception) -> str:
    """The message of an exception, with the line of a syntax error."""
    line = getattr(error, "lineno", None)
    message = f"{error}"[:MAX_MESSAGE] or type(error).__name__
    return message if line is None else f"{message} (syntax error in line {line})"


def main() -> None:
    """Answers requests until the input ends."""
    _limit_memory()
    # Ctrl-C in a terminal is for the command; this process ends together with it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # Anything that a library prints must not be mistaken for a reply.
    replies, sys.stdout = sys.stdout.buffer, sys.stderr
    replies.write(as_line({"ready": True}))
    replies.flush()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        for chat in request["chats"]:
            # The signal's default action: the kernel kills the process, whatever Python is doing.
            signal.setitimer(signal.ITIMER_REAL, request["seconds"])
            reply = answer(request, chat)
            signal.setitimer(signal.ITIMER_REAL, 0)
            replies.write(as_line(reply))
            replies.flush()


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    # Address space and not resident memory, because Linux does not enforce the latter.
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    # A crash must not leave a core dump behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
