"""Threads for slow work that must not block the event loop: reading bodies and building responses."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class WorkerThreads:
    """Runs a limited number of calls at a time, each in a daemon thread.

    The pools of `concurrent.futures` are not used: Python waits for their threads when it exits, and a
    hanging call would keep the process alive.
    """

    def __init__(self, max_calls: int, name: str):
        """Starts no thread yet.

        Args:
          max_calls: maximum number of calls at a time; others wait.
          name: name of the threads.
        """
        self._free, self._name = asyncio.Semaphore(max_calls), name

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        """Calls a function in a thread, after the calls that are already waiting.

        If the caller is cancelled, its thread still counts until the function returns, because a thread
        cannot be interrupted. So hanging calls never use more threads than the limit.

        Raises:
          Exception: whatever the function raises.
        """
        # Waiting callers need no thread: only running calls have one.
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()

        def finish(value: Any, error: BaseException | None) -> None:
            self._free.release()
            if result.done():  # the caller was cancelled
                return
            if error is None:
                result.set_result(value)
            else:
                result.set_exception(error)

        def work() -> None:
            try:
                outcome = function(*arguments), None
            # The caller raises the error again in the event loop, even SystemExit: nobody would see it here.
            except BaseException as error:
                outcome = None, error
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(finish, *outcome)

        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except RuntimeError:  # the system's limit of threads is reached
            self._free.release()
            raise
        return await result
