"""A pool of worker processes that render chat templates from elsewhere, and are killed after a timeout."""

import atexit
import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.templates.worker import MAX_MEMORY_BYTES, as_line

RENDER_SECONDS = 5.0
"""Time limit per chat. Templates on the hub take a millisecond, or 0.1 s for a chat of a megabyte."""
# Time that a worker has after its limit to end by itself, before it is killed.
_GRACE_SECONDS = 5.0
_START_SECONDS = 120.0
_MAX_IDLE = 4
# Environment variables that a worker inherits; templates must not see secrets such as API keys.
_KEPT_VARIABLES = ("PATH", "HOME", "TZ", "LANG", "LC_ALL", "LC_CTYPE", "LD_LIBRARY_PATH", "TMPDIR")


class _Ended(Exception):
    """A worker has ended, or must be killed. The message says why."""


def render_all(template: str, chats: Sequence[Mapping[str, Any] | None]) -> Iterator[dict[str, Any]]:
    """Renders chats in a worker, and yields each reply as soon as it is ready.

    A chat that takes too long is the last one, because its worker is killed.

    Args:
      template: template in Jinja.
      chats: chats as `zaya_jax.data.chats.templates.jinja_environment.render` reads them; None inspects the
        template.

    Yields:
      The fields of a rendered chat, or the field `error` with the reason why there is none.
    """
    request = {"template": template, "chats": list(chats), "seconds": RENDER_SECONDS}
    worker, is_whole = None, False
    try:
        worker = _take()
        yield from worker.answers(request)
        is_whole = True
    except _Ended as ended:
        yield {"error": str(ended)}
    finally:
        # After an error, an interruption, or if the caller stops early, replies may still be on their way,
        # so the worker cannot be reused.
        if worker is not None:
            _give_back(worker) if is_whole else worker.kill()


class _Worker:
    """A worker process."""

    def __init__(self):
        package = str(pathlib.Path(__file__).resolve().parents[4])
        # A socket and not two pipes: reading and writing it have timeouts.
        self._socket, theirs = socket.socketpair()
        self._replies = self._socket.makefile("rb")
        self._process = subprocess.Popen(
            # -P: a module in the current folder must not replace one that the worker imports.
            [sys.executable, "-P", "-m", "zaya_jax.data.chats.templates.worker"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            env={name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
            | {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))},
            # Signals from a terminal are for the command only.
            start_new_session=True,
        )
        theirs.close()
        try:
            self._read(_START_SECONDS)
        except BaseException:
            self.kill()
            raise

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def answers(self, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields the replies to a request's chats."""
        # If the worker has ended, `_read` reports it. A worker reads the whole request before it replies.
        with contextlib.suppress(OSError):
            self._socket.sendall(as_line(request))
        for _ in request["chats"]:
            yield self._read(request["seconds"] + _GRACE_SECONDS)

    def _read(self, seconds: float) -> dict[str, Any]:
        self._socket.settimeout(seconds)
        line, is_timeout = b"", False
        try:
            line = self._replies.readline(MAX_MEMORY_BYTES)
        except TimeoutError:
            is_timeout = True
        except ConnectionError:  # the worker has ended, as at the end of the stream
            pass
        if line.endswith(b"\n"):
            return json.loads(line)
        if is_timeout or (code := self._process.wait(_GRACE_SECONDS)) == -signal.SIGALRM:
            raise _Ended(f"it takes longer than {RENDER_SECONDS:g} seconds")
        raise _Ended(f"the process that renders it ended: exit code {code}")

    def kill(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.wait(_GRACE_SECONDS)
        self._replies.close()
        self._socket.close()


# Idle workers

_IDLE: list[_Worker] = []
_LOCK = threading.Lock()


def _take() -> _Worker:
    while True:
        with _LOCK:
            worker = _IDLE.pop() if _IDLE else None
        if worker is None:
            return _Worker()
        if worker.is_alive:
            return worker
        worker.kill()


def _give_back(worker: _Worker) -> None:
    with _LOCK:
        if len(_IDLE) < _MAX_IDLE:
            _IDLE.append(worker)
            return
    worker.kill()


@atexit.register
def _end_workers() -> None:
    with _LOCK:
        workers, _IDLE[:] = list(_IDLE), []
    for worker in workers:
        worker.kill()


# A forked child cannot use the workers of its parent.

os.register_at_fork(after_in_child=_IDLE.clear)
