"""A process that compiles for AMD GPUs, and its pipe.

Compilers run in separate processes because XLA may abort the process that compiles, and does not return
its memory. Requests and replies are Python objects; what the process prints goes to a log.
"""

import contextlib
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Collection
from typing import Any

from zaya_jax.errors import UserError

LOG = "log.txt"
POLL_SECONDS = 0.5
EXIT_SECONDS = 2.0


class CompilerProcess:
    """A process of `python -m MODULE PIPE FOLDER`, which replies to the objects that it receives.

    Attributes:
      folder: folder of its log, and of XLA's code objects in `code`. It stays after a failure, so that the
        reason can be found.
    """

    def __init__(self, module: str, *, without: Collection[str] = ()):
        """Starts the process.

        Args:
          module: module that `-m` runs, with the number of its end of the pipe and the folder.
          without: environment variables that it must not inherit.
        """
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="zaya_plan_"))
        (self.folder / "code").mkdir()
        environment = _environment(self.folder)
        self._pipe, there = multiprocessing.Pipe()
        # Only the process may hold its end, so that its exit closes the pipe; and the other way around: it
        # ends when this process does, also after a SIGKILL.
        with there, (self.folder / LOG).open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, str(there.fileno()), str(self.folder)],
                env={name: value for name, value in environment.items() if name not in without},
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,  # it must not take what the user types meanwhile
                stdout=log,
                stderr=log,
            )
        self._end = weakref.finalize(self, _end, self._process, self.folder)

    def request(
        self,
        name: str,
        message: Any,
        *,
        time_limit: float,
        late: str,
        progress: Callable[[float], None] | None = None,
        early: Callable[[], Any] = lambda: None,
    ) -> Any:
        """Sends an object and returns the reply.

        Args:
          name: what is compiled, for error messages.
          message: object that pickle supports.
          time_limit: timeout in seconds.
          late: end of the error message after the timeout.
          progress: callback that receives the elapsed seconds, about twice a second.
          early: function that is called as often; a result other than None replaces the reply.

        Raises:
          UserError: if the process ends or does not reply in time, with the reason and its log.
        """
        began = time.monotonic()
        try:
            self._pipe.send(message)
            while not self._pipe.poll(min(POLL_SECONDS, time_limit)):
                if (result := early()) is not None:
                    return result
                if (seconds := time.monotonic() - began) > time_limit:
                    raise UserError(f"{name} was not compiled{late}; its log is {self.stop()}")
                if progress:
                    progress(seconds)
            return self._pipe.recv()
        except (ConnectionError, EOFError):
            # A process that has closed its pipe is about to end; a kill would hide the signal that ends it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=EXIT_SECONDS)
            log = self.stop()
            reason = _exit_reason(self._process.returncode, log)
            raise UserError(f"{name} was not compiled: {reason}; its log is {log}") from None

    def stop(self) -> pathlib.Path:
        """Ends the process after a failure, and returns its log, which stays."""
        self._end.detach()
        self._process.kill()
        self._process.wait()
        return self.folder / LOG

    def close(self) -> None:
        """Ends the process and deletes its folder, unless a failure has ended it."""
        self._end()


def _end(process: subprocess.Popen, folder: pathlib.Path) -> None:
    process.kill()
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def _environment(folder: pathlib.Path) -> dict[str, str]:
    # The child must import this package also when it is not installed.
    package = pathlib.Path(__file__).resolve().parents[3]
    search_path = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {
        # The devices are only described: no backend for this machine's own accelerators may start.
        "JAX_PLATFORMS": "cpu",
        # Otherwise jax ends a traceback with a note about it, and the last line of the log is not the reason.
        "JAX_TRACEBACK_FILTERING": "off",
        "PYTHONPATH": os.pathsep.join(search_path),
        # Keep the code objects, which contain the kernels' resources; XLA writes them to the temporary
        # folder.
        "TF_ROCM_KEEP_XLA_TEMPFILES": "1",
        "TMPDIR": str(folder / "code"),
    }


def _exit_reason(code: int, log: pathlib.Path) -> str:
    """Why a process that compiles failed, in one line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if code >= 0:
        return lines[-1] if lines else f"the compiler ended with code {code}"
    # A negative exit code is the signal that ended the process.
    name = signal.Signals(-code).name
    fatal = [line for line in lines if re.match(r"F\d{4} ", line)]  # format of a failed check in XLA
    # Linux ends a process by this signal when the memory is full.
    hint = " (the machine ran out of memory?)" if name == "SIGKILL" else ""
    return f"the compiler ended with {name}{hint}" + (f", {fatal[-1]}" if fatal else "")
