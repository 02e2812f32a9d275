"""Threads that compile in the background, and the exit of a process whose compiler is still running."""

import atexit
import os
import sys
import threading
from collections.abc import Callable

COMPILE_THREAD = "compile"
"""Name of the threads that compile."""


def start_compiling(compile_program: Callable[[], None]) -> threading.Thread:
    """Starts a function in the thread for compiling.

    Args:
      compile_program: function that compiles.
    """

    def run() -> None:
        try:
            compile_program()
        finally:
            atexit.unregister(thread.join)

    thread = threading.Thread(target=run, name=COMPILE_THREAD, daemon=True)
    # A process that exits by itself waits for its compiler; `leave_compiler` does not.
    atexit.register(thread.join)
    thread.start()
    return thread


def leave_compiler(code: str | int | None) -> None:
    """Ends the process at once if its compiler is still running, as after a signal; otherwise returns.

    XLA cannot be interrupted, and can take minutes. At exit Python would end its thread in the middle of C++
    code, which aborts the process instead of ending it with its exit code.

    Args:
      code: exit code of the process, as for `sys.exit`.
    """
    if not any(thread.name == COMPILE_THREAD for thread in threading.enumerate()):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
