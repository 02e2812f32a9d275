"""Timing of several programs, each in a process of its own, that take turns."""

import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

from zaya_jax.bench.measure import seconds

LIMIT_SECONDS = 600.0
"""For a call, and for getting ready."""
SETTLING_SECONDS = 0.2
"""Threads of a program wait for more work for a while after a call, and keep a core from the next."""
PARTING_SECONDS = 5.0
"""For a process to end by itself, once nobody asks it any more."""

Program = Callable[[], Callable[[], Any]]
"""Gets ready, and returns the call that is timed."""


def best_in_turn(
    programs: dict[str, Program], *, rounds: int, limit: float = LIMIT_SECONDS
) -> dict[str, float]:
    """The best time of a call of each program, in seconds.

    They share the machine's moods, but no threads and no memory: each has its process as its users have
    it.

    Args:
      programs: by name; functions of a module, or `functools.partial` of such: a process that starts
        anew must find them.
      rounds: how often each is timed, after one call that is not.
      limit: seconds in which a process must be ready, and answer a call.

    Raises:
      RuntimeError: when a process fails, ends before its time, or takes longer.
    """
    times = _in_turn(programs, seconds, rounds, limit)
    return {name: min(each) for name, each in times.items()}


def answers_in_turn(
    programs: dict[str, Program], *, rounds: int, limit: float = LIMIT_SECONDS
) -> dict[str, list[Any]]:
    """What the calls of each program return, which measure for themselves: all of them, as `best_in_turn`."""
    return _in_turn(programs, _call, rounds, limit)


def _call(call: Callable[[], Any]) -> Any:
    return call()


def _in_turn(
    programs: dict[str, Program], measure: Callable[[Callable[[], Any]], Any], rounds: int, limit: float
) -> dict[str, list[Any]]:
    with contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(_running(name, make, measure, limit)) for name, make in programs.items()
        ]
        answers = [[process.turn() for process in running] for _ in range(rounds)]
    return dict(zip(programs, map(list, zip(*answers, strict=True)), strict=True))


@dataclasses.dataclass(frozen=True)
class _Failure:
    """What an exception of another process says. Not all of torch's can be sent themselves."""

    said: str


@dataclasses.dataclass(frozen=True)
class _Process:
    """A program that waits for its turn."""

    name: str
    connection: Connection
    limit: float

    def turn(self) -> Any:
        """What is measured of one call of the program."""
        time.sleep(SETTLING_SECONDS)
        with contextlib.suppress(ConnectionError):  # from a process that has ended; its answer says so
            self.connection.send(None)
        return self.answer()

    def answer(self) -> Any:
        """What the process sends next."""
        if not self.connection.poll(self.limit):
            raise RuntimeError(f'"{self.name}" has not answered within {self.limit:,.0f} seconds')
        try:
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError(f'the process of "{self.name}" ended before its time') from None
        if isinstance(answer, _Failure):
            raise RuntimeError(f'"{self.name}" failed: {answer.said}')
        return answer


@contextlib.contextmanager
def _running(
    name: str, make: Program, measure: Callable[[Callable[[], Any]], Any], limit: float
) -> Iterator[_Process]:
    """A process that is ready; it ends with the block."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_serve, args=(make, measure, there), daemon=True)
    process.start()
    there.close()
    try:
        running = _Process(name, here, limit)
        running.answer()
        yield running
    finally:
        here.close()
        process.join(PARTING_SECONDS)  # killed at once, torch would leave semaphores behind, and say so
        process.kill()
        process.join()


def _serve(make: Program, measure: Callable[[Callable[[], Any]], Any], connection: Connection) -> None:
    """Measures a call whenever it is asked to."""
    try:
        call = make()
        answer = measure(call)  # compiles, and is not counted
        while True:
            connection.send(answer)
            connection.recv()
            answer = measure(call)
    except EOFError:  # nobody asks any more
        return
    except Exception as error:
        connection.send(_Failure(repr(error)))
