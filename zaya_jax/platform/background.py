"""Work in a thread that never keeps a process from exiting."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def in_background(work: Callable[[], T], name: str) -> concurrent.futures.Future[T]:
    """Runs a function in a daemon thread; threads of a pool would keep a process from exiting.

    Args:
      work: function to run; its exception is raised where its result is read.
      name: name of the thread.
    """
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # any exception is for the thread that waits
            future.set_exception(error)

    # A daemon: a process that must exit is not held up by a slow disk.
    threading.Thread(target=run, name=name, daemon=True).start()
    return future
