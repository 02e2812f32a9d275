"""Alternating timing of several programs, each in its own process."""

import contextlib
import dataclasses
import multiprocessing
import operator
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from zaya_jax.bench.measure import seconds

LIMIT_SECONDS = 600.0
"""Timeout for starting a program and for each call."""
SETTLING_SECONDS = 0.2
"""Pause before a call: the threads of the previous program spin for a while after its call and occupy cores.
"""
EXIT_SECONDS = 5.0
"""Time that a process has to exit by itself after the last call."""

Program = Callable[[], Callable[[], Any]]
"""Prepares a measurement and returns the call to time."""


def best_interleaved(
    programs: dict[str, Program], *, rounds: int, limit: float = LIMIT_SECONDS
) -> dict[str, float]:
    """Returns the best time in seconds of a call of each program.

    The programs alternate, so that changes of the machine's load affect all of them. They share no threads
    and no memory: each runs in its own process, as its users run it.

    Args:
      programs: programs by name; module-level functions or `functools.partial` of such, which a spawned
        process can import.
      rounds: number of timed calls of each program, after one untimed call.
      limit: timeout in seconds for starting a process and for each call.

    Raises:
      RuntimeError: if a process fails, exits early, or exceeds the timeout.
    """
    times = _run_interleaved(programs, seconds, rounds, limit)
    # The best time, because other programs can only make a call slower.
    return {name: min(each) for name, each in times.items()}


def results_interleaved(
    programs: dict[str, Program],
    *,
    rounds: int,
    limit: float = LIMIT_SECONDS,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, list[Any]]:
    """Returns the results of all calls of each program, for programs that measure themselves. See
    `best_interleaved`.

    Args:
      programs: programs by name.
      rounds: number of calls of each program that count.
      limit: timeout in seconds.
      check: function of the results of the first calls, which do not count; it raises if they are wrong.
    """
    return _run_interleaved(programs, operator.call, rounds, limit, check)


def _run_interleaved(
    programs: dict[str, Program],
    measure: Callable[[Callable[[], Any]], Any],
    rounds: int,
    limit: float,
    check: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, list[Any]]:
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(_running(name, make, measure, limit)) for name, make in programs.items()
        ]
        if check is not None:
            check({process.name: process.first for process in running})
        # The rounds are the outer loop: the processes take turns, and only one of them works at a time.
        answers = [[process.call() for process in running] for _ in range(rounds)]
    return dict(zip(programs, map(list, zip(*answers, strict=True)), strict=True))


@dataclasses.dataclass(frozen=True)
class _Process:
    """A program in its own process."""

    name: str
    connection: Connection
    limit: float
    first: Any = None
    """Result of the call that does not count."""

    def call(self) -> Any:
        """Runs one measured call of the program and returns its result."""
        time.sleep(SETTLING_SECONDS)
        with contextlib.suppress(ConnectionError):  # the process has exited; `receive` reports it
            self.connection.send(None)
        return self.receive()

    def receive(self) -> Any:
        """Receives the next result from the process."""
        if not self.connection.poll(self.limit):
            raise RuntimeError(f'"{self.name}" did not finish within {self.limit:,.0f} seconds')
        try:
            failure, answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f'the process of "{self.name}" exited early') from None
        if failure:
            raise RuntimeError(f'"{self.name}" failed: {failure}')
        return answer


@contextlib.contextmanager
def _running(
    name: str, make: Program, measure: Callable[[Callable[[], Any]], Any], limit: float
) -> Iterator[_Process]:
    """Starts a process, waits until it is ready, and ends it with the block."""
    # Not "fork": JAX and torch start threads, which a forked child would lose.
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    # Not a daemon, which may not start processes, such as the workers of a build.
    process = context.Process(target=_serve, args=(make, measure, there))
    process.start()
    # Only the child may hold its end, so that its exit closes the connection.
    there.close()
    try:
        running = _Process(name, here, limit)
        yield dataclasses.replace(running, first=running.receive())
    finally:
        # The closed connection tells the child to end.
        here.close()
        process.join(EXIT_SECONDS)  # torch leaks semaphores, and warns about it, when its process is killed
        process.kill()
        process.join()


def _serve(make: Program, measure: Callable[[Callable[[], Any]], Any], connection: Connection) -> None:
    """Measures a call for each request of the parent process."""
    try:
        call = make()
        answer = measure(call)  # compiles; not counted
        while True:
            connection.send(("", answer))
            connection.recv()
            answer = measure(call)
    except EOFError:  # the parent closed the connection
        return
    except Exception as error:
        # As text, because not all of torch's exceptions can be pickled.
        connection.send((repr(error), None))
