"""Protocol of one process in the tree: which messages it sends when others arrive.

A state machine without sockets, threads and clocks: `links` runs it over TCP, and `zaya bench control`
runs thousands of them in a simulation. Values are merged on their way to process 0, so that it handles one
message per child, whatever the number of processes.

Messages, each a JSON object with a `kind`:
  up      child to parent: values of an exchange from a subtree, merged, and processes that are late
  down    parent to child: result of an exchange, or value of a broadcast
  ask     parent to child, after the time limit: answer now with what has arrived
  post    child to parent: message that any process may post
  notice  parent to child: posted message; the first one under a key counts
  alive   both ways: sign of life, with the processes that send none
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from zaya_jax.parallel.processes.tree.shape import Place

ANSWER_SECONDS = 1.0
"""Time for a process to answer after the time limit, per level of the tree."""

ALIVE = "alive"
"""Kind of the messages that are signs of life."""

Message = dict[str, Any]
Merge = Callable[[list[Any]], Any]
"""Function from values of consecutive processes, at least one, to one value of the same kind."""
Late = list[tuple[int, int]]
"""Processes that have not arrived, each with the number of processes whose values it keeps from process 0."""


@dataclasses.dataclass
class Result:
    """Outcome of an exchange.

    Attributes:
      value: merged value, without those of late processes; None if there is none.
      late: late processes.
    """

    value: Any
    late: Late


@dataclasses.dataclass
class _Exchange:
    """What has arrived for one exchange in this process."""

    own: list[Any] = dataclasses.field(default_factory=list)
    """The value of this process as the only element; empty until the process arrives."""
    merge: Merge | None = None
    to_all: bool = True
    by_child: dict[int, Message] = dataclasses.field(default_factory=dict)
    is_asked: bool = False
    is_sent: bool = False
    """Whether the values have left: to the parent, or from process 0 as the result."""


class TreeNode:
    """One process in the tree. Its caller serializes all calls.

    Args:
      place: place of the process.
      send: sends a message to the parent or a child, without waiting for it.
      after: calls a function after a number of seconds.

    Attributes:
      results: results that have arrived, by key; `take` removes them.
      notices: posted messages by key.
      silent: processes that send no sign of life, as far as this process knows.
    """

    def __init__(
        self,
        place: Place,
        *,
        send: Callable[[int, Message], None],
        after: Callable[[float, Callable[[], None]], None],
    ):
        self.place, self._send, self._after = place, send, after
        self._exchanges: dict[str, _Exchange] = {}
        # Number of the latest exchange of each name in which this process has arrived.
        self._arrived: dict[str, int] = {}
        self.results: dict[str, Result] = {}
        self.notices: dict[str, str] = {}
        self.silent: frozenset[int] = frozenset()
        # By child: the silent processes of its subtree, with itself.
        self._silent_below: dict[int, frozenset[int]] = {}

    # What this process does

    def arrive(self, name: str, number: int, value: Any, merge: Merge, *, to_all: bool = True) -> None:
        """Contributes the value of this process to an exchange.

        Args:
          name: name of the exchange.
          number: number of earlier exchanges of this name.
          value: JSON value of this process.
          merge: function that merges values.
          to_all: whether all processes receive the merged value; else only process 0 does, and the others
            receive None once it has it.
        """
        self._arrived[name] = number
        exchange = self._exchange(_key(name, number))
        exchange.own, exchange.merge, exchange.to_all = [value], merge, to_all
        self._advance(_key(name, number), exchange)

    def publish(self, name: str, number: int, value: Any) -> None:
        """Sends a value from process 0 to all others."""
        self._down({"kind": "down", "key": _key(name, number), "value": value, "late": []})

    def expire(self, name: str, number: int) -> None:
        """Ends an exchange at its time limit. Only process 0 calls it.

        Processes that answer at once differ from those that do not answer at all: through a stopped
        process no values arrive of those that it connects, which are not late themselves.
        """
        key = _key(name, number)
        if key in self._exchanges:
            self._ask(key, self._exchanges[key], ANSWER_SECONDS * self.place.height)

    def take(self, name: str, number: int) -> Result | None:
        """Removes and returns a result; None if it has not arrived."""
        return self.results.pop(_key(name, number), None)

    def post(self, key: str, text: str) -> None:
        """Posts a message to all processes, by way of process 0."""
        if self.place.parent is not None:
            self._send(self.place.parent, {"kind": "post", "key": key, "text": text})
        elif key not in self.notices:
            self._notice({"kind": "notice", "key": key, "text": text})

    def beat(self, silent: Sequence[int]) -> None:
        """Sends a sign of life to the neighbors in the tree.

        Args:
          silent: neighbors that have sent none for too long.
        """
        below = {child: frozenset(set(silent) & {child}) for child in self.place.children}
        for child, known in self._silent_below.items():
            # What a silent child reported about others is outdated.
            below[child] = below[child] or known - {child}
        self._silent_below = below
        self._share_silent(self.silent | (set(silent) & {self.place.parent}), always=True)

    # What arrives

    def receive(self, sender: int, message: Message) -> None:
        """Handles a message of the parent or a child."""
        getattr(self, f"_on_{message['kind']}")(sender, message)

    def _on_up(self, sender: int, message: Message) -> None:
        key = message["key"]
        exchange = self._exchange(key)
        # The first answer counts: a later one crossed a question, whose answer was sent already.
        if sender not in exchange.by_child and not exchange.is_sent:
            exchange.by_child[sender] = message
            self._advance(key, exchange)

    def _on_down(self, sender: int, message: Message) -> None:
        self._down(message)

    def _on_ask(self, sender: int, message: Message) -> None:
        name, _, number = message["key"].rpartition("/")
        # Without a record the exchange has ended here, and its values are on their way.
        if message["key"] in self._exchanges or self._arrived.get(name, -1) < int(number):
            self._ask(message["key"], self._exchange(message["key"]), message["seconds"])

    def _on_post(self, sender: int, message: Message) -> None:
        self.post(message["key"], message["text"])

    def _on_notice(self, sender: int, message: Message) -> None:
        self._notice(message)

    def _on_alive(self, sender: int, message: Message) -> None:
        silent = frozenset(message["silent"])
        if sender == self.place.parent:
            self._share_silent(silent, always=False)
        # At once if it changed: by the interval of signs alone, a tree of some levels would be too slow.
        elif self._silent_below.get(sender, frozenset()) != silent:
            self._silent_below[sender] = silent
            self._share_silent(self.silent, always=False, upward=True)

    # Exchanges

    def _exchange(self, key: str) -> _Exchange:
        return self._exchanges.setdefault(key, _Exchange())

    def _advance(self, key: str, exchange: _Exchange) -> None:
        """Passes the values on once all have arrived, or at once after a question of the parent."""
        if exchange.is_sent or len(exchange.by_child) < len(self.place.children):
            return
        if exchange.own or exchange.is_asked:
            self._pass_on(key, exchange)

    def _pass_on(self, key: str, exchange: _Exchange) -> None:
        exchange.is_sent = True
        place, by_child = self.place, exchange.by_child
        # Own value first and then the children's: that is the order of the processes.
        late = [] if exchange.own else [(place.process, 0)]
        values = list(exchange.own)
        for child in place.children:
            if child in by_child:
                values += by_child[child]["values"]
                late += by_child[child]["late"]
            else:
                # It does not answer, so that nothing is known of those below it either.
                late.append((child, place.child_size(child) - 1))
        # Before this process arrives it does not know how to merge.
        if exchange.merge is not None and len(values) > 1:
            values = [exchange.merge(values)]
        if place.parent is not None:
            self._send(place.parent, {"kind": "up", "key": key, "values": values, "late": late})
            return
        value = next(iter(values), None)
        # Also without a value for the others: they must know that process 0 has it, or who is late.
        self._down({"kind": "down", "key": key, "value": value if exchange.to_all else None, "late": late})
        self.results[key].value = value

    def _ask(self, key: str, exchange: _Exchange, seconds: float) -> None:
        if exchange.is_sent or exchange.is_asked:
            return
        exchange.is_asked = True
        for child in self.place.children:
            if child not in exchange.by_child:
                self._send(child, {"kind": "ask", "key": key, "seconds": seconds - ANSWER_SECONDS})
        self._advance(key, exchange)
        # The time of each level is shorter than that of the one above, which waits for its answer.
        if not exchange.is_sent:
            self._after(seconds, lambda: None if exchange.is_sent else self._pass_on(key, exchange))

    def _down(self, message: Message) -> None:
        for child in self.place.children:
            self._send(child, message)
        late = [tuple(each) for each in message["late"]]
        self._finish(message["key"], Result(message["value"], late))

    def _finish(self, key: str, result: Result) -> None:
        self._exchanges.pop(key, None)
        self.results[key] = result

    # Notices and signs of life

    def _notice(self, message: Message) -> None:
        self.notices[message["key"]] = message["text"]
        for child in self.place.children:
            self._send(child, message)

    def _share_silent(self, known: frozenset[int], *, always: bool, upward: bool = False) -> None:
        """Sends the silent processes up and down: always with a sign of life, else where they changed."""
        below = frozenset(itertools.chain.from_iterable(self._silent_below.values()))
        if self.place.parent is None:
            known = below
        elif always or upward:
            self._send(self.place.parent, {"kind": ALIVE, "silent": sorted(below)})
        if always or known != self.silent:
            for child in self.place.children:
                self._send(child, {"kind": ALIVE, "silent": sorted(known)})
        self.silent = known


def _key(name: str, number: int) -> str:
    return f"{name}/{number}"
