"""Work that process 0 distributes to the other processes of a run.

It is for work that only process 0 can plan, that the devices of all processes can do, and that needs no
collective: an evaluation harness, for example, requests batch after batch. Requests and results are JSON
messages through jax's coordination service, between process 0 and the one that works, and are deleted after
they are read.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes import coordination_service, hosts
from zaya_jax.parallel.processes.errors import CollectiveError, PeerLost, PeerTimeout

# Length of one wait for a message. Python handles signals only between such waits.
_POLL_SECONDS = 1.0


class WorkCoordinator:
    """Process 0's end of the exchange. `coordinator` creates it.

    Args:
      name: see `coordinator`.
      limit_seconds: see `coordinator`.
    """

    def __init__(self, name: str, limit_seconds: float):
        self._name, self.limit_seconds = name, limit_seconds
        self._counts: collections.Counter[int] = collections.Counter()

    def submit(self, process: int, work: Any) -> int:
        """Requests work from a process.

        Args:
          process: number of the process, not 0.
          work: JSON value.

        Returns:
          The number of the request, for `result`.
        """
        return self._send(process, {"work": work})

    def result(self, process: int, number: int) -> Any:
        """Waits for the result of a request, a JSON value.

        Raises:
          PeerTimeout: if it does not arrive in time.
          CollectiveError: if the work failed.
        """
        key = _result_key(self._name, process, number)
        late = f"waited {self.limit_seconds:.0f} s for the work of {hosts.describe(process)}"
        reply = _receive(key, self.limit_seconds, late)
        if "failure" in reply:
            raise CollectiveError(f"{hosts.describe(process)}: {reply['failure']}", is_printed_here=True)
        return reply["result"]

    def end(self, failure: str | None, *, is_shared: bool = True) -> None:
        """Ends the work of all processes.

        Args:
          failure: message of the error that ended the work; None if it is complete.
          is_shared: whether all processes raise the failure and disconnect in order.
        """
        for process in range(1, hosts.num_processes()):
            self._send(process, {"end": failure, "is_shared": is_shared})

    def _send(self, process: int, request: dict[str, Any]) -> int:
        number = self._counts[process]
        self._counts[process] += 1
        coordination_service.put_message(_request_key(self._name, process, number), json.dumps(request))
        return number


@contextlib.contextmanager
def coordinator(name: str, *, limit_seconds: float) -> Iterator[WorkCoordinator]:
    """Lets process 0 request work from the others, which run `serve_work`, until the context ends.

    Args:
      name: name of this work, unique among all work of these processes, so that a message left over from one
        is not read by the next.
      limit_seconds: time limit in seconds for each result.

    Raises:
      CollectiveError: for a UserError or an OSError in the context, which all processes then raise.
    """
    work = WorkCoordinator(name, limit_seconds)
    if hosts.num_processes() == 1:
        yield work
        return
    try:
        yield work
    except (UserError, OSError) as error:
        message = hosts.error_message(error)
        work.end(message)
        raise CollectiveError(message, is_printed_here=True) from error
    # The others must not wait for a process that is about to exit.
    except BaseException as error:
        work.end(f"{hosts.describe(0)} ended with {type(error).__name__}: {error}", is_shared=False)
        raise
    work.end(None)


def serve_work(name: str, work: Callable[[Any], Any], *, num_threads: int) -> None:
    """Does the work that process 0 requests, until it ends the work.

    Process 0 may plan for any time, so that this wait has no time limit. If process 0 is gone or silent,
    jax's coordination service ends this process (`zaya_jax.parallel.processes.liveness`).

    Args:
      name: see `coordinator`.
      work: function from the JSON value of a request to that of its result; called in threads.
      num_threads: number of requests that are worked on at the same time.

    Raises:
      CollectiveError: with the message of process 0, if it failed.
      PeerLost: if process 0 did not end in order.
    """
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    try:
        for number in itertools.count():
            request = _receive(_request_key(name, hosts.process(), number), math.inf)
            if "end" in request:
                break
            pool.submit(_do, name, number, work, request["work"])
    finally:
        # Nobody waits any more for the requests that have not been begun.
        pool.shutdown(cancel_futures=True)
    if (failure := request["end"]) is not None:
        raise CollectiveError(failure, is_printed_here=False) if request["is_shared"] else PeerLost(failure)


def _receive(key: str, limit_seconds: float, late: str = "") -> dict[str, Any]:
    """Waits for a message and deletes it.

    Args:
      key: key of the message.
      limit_seconds: time limit in seconds.
      late: message of the PeerTimeout at the limit.
    """
    deadline = time.monotonic() + limit_seconds
    while (message := coordination_service.wait_for_message(key, limit_seconds=_POLL_SECONDS)) is None:
        if time.monotonic() > deadline:
            raise PeerTimeout(late)
    # The messages are in the memory of the coordination service, which thousands of them would fill.
    coordination_service.delete_message(key)
    return json.loads(message)


def _do(name: str, number: int, work: Callable[[Any], Any], argument: Any) -> None:
    """Does the work of a request, and posts its result or failure."""
    try:
        reply = {"result": work(argument)}
    # Every failure is posted: otherwise process 0 would wait until its time limit.
    except Exception as error:
        if not isinstance(error, UserError | OSError):
            traceback.print_exc()  # a bug: its message alone would hide the location
        reply = {"failure": hosts.error_message(error) or type(error).__name__}
    coordination_service.put_message(_result_key(name, hosts.process(), number), json.dumps(reply))


def _request_key(name: str, process: int, number: int) -> str:
    return f"zaya/requests/{name}/{process}/{number}"


def _result_key(name: str, process: int, number: int) -> str:
    return f"zaya/results/{name}/{process}/{number}"
