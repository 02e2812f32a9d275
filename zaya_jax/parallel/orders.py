"""Process 0 has others work: each gets orders of its own, and says what came of them.

For work that one process alone can plan and the devices of all can do, without a collective: an evaluation,
of which a harness asks now this and now that. Words go as those of `hosts` do, as JSON, and each is forgotten
once it was heard.
"""

import collections
import concurrent.futures
import contextlib
import itertools
import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from zaya_jax.parallel import hosts
from zaya_jax.parallel.failures import Late, Lost, Shared

_LISTEN_SECONDS = 1.0
"""Between two looks whether a signal has come, which Python hears only between words of the service."""
_SIGNS = 4
"""Of life that process 0 gives within the limit, while it has nothing to ask."""


class Orders:
    """What process 0 wants of the others. `giving_orders` makes one."""

    def __init__(self, name: str, limit_seconds: float):
        self._name, self.limit_seconds = name, limit_seconds
        self._numbers: collections.Counter[int] = collections.Counter()
        # The thread that gives signs of life numbers its words too.
        self._numbering = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._give_signs, name="orders", daemon=True)

    def give(self, process: int, work: Any) -> int:
        """Asks a process for work.

        Args:
          process: its number, which is not 0.
          work: JSON.

        Returns:
          The number of the order, for `answer`.
        """
        return self._say(process, {"work": work})

    def answer(self, process: int, number: int) -> Any:
        """What came of an order: JSON.

        Raises:
          Late: if nothing did within the limit.
          Shared: if the process could not do it.
        """
        key, deadline = _answer_key(self._name, process, number), time.monotonic() + self.limit_seconds
        while (word := hosts.heard(key, limit_seconds=_LISTEN_SECONDS)) is None:
            if time.monotonic() > deadline:
                raise Late(f"waited {self.limit_seconds:.0f} s for what {hosts.describe(process)} works at")
        hosts.forget(key)
        said = json.loads(word)
        if "failure" in said:
            raise Shared(f"{hosts.describe(process)}: {said['failure']}", is_told_here=True)
        return said["done"]

    def begin(self) -> None:
        """Gives signs of life from now on."""
        self._thread.start()

    def end(self, failure: str | None, *, is_shared: bool = True) -> None:
        """Tells all that there is no more to do, or why; `is_shared` where all part in good order."""
        self._closed.set()
        self._thread.join()
        for process in range(1, hosts.num_processes()):
            self._say(process, {"end": failure, "is_shared": is_shared})

    def _say(self, process: int, order: dict[str, Any]) -> int:
        with self._numbering:
            number = self._numbers[process]
            self._numbers[process] += 1
        hosts.say_once(_order_key(self._name, process, number), json.dumps(order))
        return number

    def _give_signs(self) -> None:
        while not self._closed.wait(self.limit_seconds / _SIGNS):
            for process in range(1, hosts.num_processes()):
                self._say(process, {})


@contextlib.contextmanager
def giving_orders(name: str, *, limit_seconds: float) -> Iterator[Orders]:
    """Is process 0, for which the others do work until this context ends; alone, there are no others.

    Args:
      name: of the work, which no other has that these processes ever do: what one left unsaid is not taken
        for a word of the next.
      limit_seconds: how long it waits for what another process works at, and others for a sign of it.

    Raises:
      Shared: for a ValueError or an OSError in the context, which all raise then.
    """
    orders = Orders(name, limit_seconds)
    if hosts.num_processes() == 1:
        yield orders
        return
    orders.begin()
    try:
        yield orders
    except (ValueError, OSError) as error:
        what = hosts.sentence(error)
        orders.end(what)
        raise Shared(what, is_told_here=True) from error
    except BaseException as error:
        orders.end(f"{hosts.describe(0)} ended with {type(error).__name__}: {error}", is_shared=False)
        raise
    orders.end(None)


def obey(name: str, work: Callable[[Any], Any], *, num_threads: int, limit_seconds: float) -> None:
    """Does what process 0 asks for, until it says that this is all.

    Args:
      name: as `giving_orders` has it.
      work: takes what was ordered and gives what came of it, both JSON; in a thread.
      num_threads: orders that are worked at together.
      limit_seconds: how long it waits for process 0, which gives signs of life.

    Raises:
      Late: if there is none.
      Shared: with the sentence for which process 0 has ended.
      Lost: if it has not ended in good order.
    """
    pool = concurrent.futures.ThreadPoolExecutor(num_threads)
    try:
        for number in itertools.count():
            order = _next(name, number, limit_seconds)
            if "work" in order:
                pool.submit(_do, name, number, work, order["work"])
            elif "end" in order:
                break
    finally:
        pool.shutdown(cancel_futures=True)
    if order["end"] is not None:
        raise Shared(order["end"], is_told_here=False) if order["is_shared"] else Lost(order["end"])


def _next(name: str, number: int, limit_seconds: float) -> dict[str, Any]:
    """The next order to this process."""
    key, deadline = _order_key(name, hosts.process(), number), time.monotonic() + limit_seconds
    while (word := hosts.heard(key, limit_seconds=_LISTEN_SECONDS)) is None:
        if time.monotonic() > deadline:
            raise Late(f"waited {limit_seconds:.0f} s for a word of {hosts.describe(0)}")
    hosts.forget(key)
    return json.loads(word)


def _do(name: str, number: int, work: Callable[[Any], Any], what: Any) -> None:
    """Says what came of an order, whatever it is: who waits for it would otherwise wait to the limit."""
    try:
        said = {"done": work(what)}
    except Exception as error:
        if not isinstance(error, ValueError | OSError):
            traceback.print_exc()  # a bug, which the sentence alone would hide
        said = {"failure": hosts.sentence(error) or type(error).__name__}
    hosts.say_once(_answer_key(name, hosts.process(), number), json.dumps(said))


def _order_key(name: str, process: int, number: int) -> str:
    return f"zaya/orders/{name}/{process}/{number}"


def _answer_key(name: str, process: int, number: int) -> str:
    return f"zaya/answers/{name}/{process}/{number}"
