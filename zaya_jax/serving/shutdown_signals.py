"""Signals that stop a server: the first one drains it, the second one ends the process in any case.

asyncio runs signal handlers in the event loop, and Python runs them in the main thread: neither runs while
that thread is in one long call. So a separate thread reads the bytes that the interpreter writes for each
signal.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading

from zaya_jax.platform.stop_signals import announce_stop, stop_signals

_GRACE_SECONDS = 5.0
"""Time after the forced end at which `faulthandler` ends a process that could not even print a message."""


def count_signals(loop: asyncio.AbstractEventLoop, *, forced_seconds: float) -> asyncio.Semaphore:
    """Returns a semaphore that is released at each signal to stop. Must be called in the main thread.

    Some time after the second signal the process ends with exit code 1, because a device step, the compiler
    or a library call cannot be interrupted. A little later `faulthandler` ends it, which needs no lock of the
    interpreter that a hanging call may hold.

    Args:
      loop: event loop of the semaphore.
      forced_seconds: time from the second signal to the forced end of the process.
    """
    shutdown_requested = asyncio.Semaphore(0)
    reading, writing = socket.socketpair()
    # The interpreter writes to this socket within a signal, where it must not block.
    writing.setblocking(False)
    for number in stop_signals():
        signal.signal(number, _do_nothing)  # without a handler the default action would end the process
        signal.siginterrupt(number, False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    arguments = (reading, writing, loop, shutdown_requested, forced_seconds)
    threading.Thread(target=_read_signals, args=arguments, name="signals", daemon=True).start()
    return shutdown_requested


def _do_nothing(number: int, frame: object) -> None:
    """Makes the interpreter write the signal's number to the wakeup file descriptor."""


def _read_signals(
    reading: socket.socket,
    writing: socket.socket,
    loop: asyncio.AbstractEventLoop,
    shutdown_requested: asyncio.Semaphore,
    forced_seconds: float,
) -> None:
    del writing  # an argument so that the socket stays open while the interpreter writes to it
    expected, received = stop_signals(), []
    # Each byte is the number of a signal.
    while numbers := reading.recv(64):
        for number in numbers:
            # A terminal that closes sends SIGHUP twice. That is one request to stop.
            if number not in expected or (number == signal.SIGHUP and received):
                continue
            # Detect a closed terminal before the next print would fail.
            announce_stop("")
            received.append(number)
            if len(received) == 2:
                _end_in(forced_seconds)
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(shutdown_requested.release)


def _end_in(seconds: float) -> None:
    faulthandler.dump_traceback_later(seconds + _GRACE_SECONDS, exit=True)
    timer = threading.Timer(seconds, _end_now)
    timer.daemon = True  # do not delay a process that ends by itself
    timer.start()


def _end_now() -> None:
    print(
        "zaya: serve: a thread is still busy after a second signal; ending the process",
        file=sys.stderr,
        flush=True,
    )
    # `sys.exit` would wait for the thread that hangs.
    os._exit(1)
