"""Protocol of the tree, with messages that arrive in random order: no sockets, threads or clocks."""

import random

import pytest

from zaya_jax.parallel.processes.tree.exchanges import first_known, join
from zaya_jax.parallel.processes.tree.protocol import TreeNode
from zaya_jax.parallel.processes.tree.shape import place_of


class Network:
    """Delivers the messages of each connection in order, and those of different ones in random order."""

    def __init__(self, count: int, *, fan_out: int = 3, seed: int = 0, stopped: tuple[int, ...] = ()):
        self._random = random.Random(seed)
        self._queues: dict[tuple[int, int], list] = {}
        self._timers: list[tuple[float, int, object]] = []
        self.stopped, self.now, self.num_messages = set(stopped), 0.0, [0] * count
        self.nodes = [
            TreeNode(
                place_of(number, count, fan_out=fan_out),
                send=lambda to, message, number=number: self._send(number, to, message),
                after=lambda seconds, work, number=number: self._timers.append(
                    (self.now + seconds, number, work)
                ),
            )
            for number in range(count)
        ]

    def _send(self, sender: int, to: int, message: dict) -> None:
        assert to in (self.nodes[sender].place.parent, *self.nodes[sender].place.children)
        self.num_messages[sender] += 1
        self.num_messages[to] += 1
        self._queues.setdefault((sender, to), []).append(message)

    def deliver(self) -> None:
        """Delivers everything, and then lets time pass until the next timer, until nothing is left."""
        while True:
            if waiting := [
                pair for pair, queue in self._queues.items() if queue and pair[1] not in self.stopped
            ]:
                sender, to = self._random.choice(waiting)
                self.nodes[to].receive(sender, self._queues[sender, to].pop(0))
            elif self._timers:
                self.now, number, work = min(self._timers, key=lambda each: each[0])
                self._timers = [each for each in self._timers if each[2] is not work]
                if number not in self.stopped:
                    work()
            else:
                return

    def arrive(self, numbers, value=lambda number: [number], merge=join, **keywords) -> None:
        order = list(numbers)
        self._random.shuffle(order)
        for number in order:
            self.nodes[number].arrive("meeting", 0, value(number), merge, **keywords)

    def results(self) -> list:
        return [node.take("meeting", 0) for node in self.nodes]


@pytest.mark.parametrize("count", [1, 2, 4, 5, 40, 121])
@pytest.mark.parametrize("seed", range(3))
def test_values_arrive_in_the_order_of_processes(count, seed):
    network = Network(count, seed=seed)
    network.arrive(range(count // 2))
    network.deliver()
    assert not any(network.results())
    network.arrive(range(count // 2, count))
    network.deliver()
    assert [result.value for result in network.results()] == [list(range(count))] * count
    # One message up and one down on each connection.
    assert all(
        number <= 2 * (len(node.place.children) + (node.place.parent is not None))
        for number, node in zip(network.num_messages, network.nodes, strict=True)
    )
    assert not any(node._exchanges or node.results for node in network.nodes)


def test_only_process_0_receives_the_value_if_the_others_do_not_need_it():
    network = Network(40)
    network.arrive(range(40), to_all=False)
    network.deliver()
    first, *others = network.results()
    assert first.value == list(range(40))
    assert all(each.value is None and each.late == [] for each in others)


def test_a_broadcast_passes_each_connection_once():
    network = Network(40)
    network.nodes[0].publish("meeting", 0, "news")
    network.deliver()
    assert [result.value for result in network.results()] == ["news"] * 40
    assert sum(network.num_messages) == 2 * 39


@pytest.mark.parametrize("late", [{5}, {39}, {1, 2}, {1, 14, 27}, set(range(1, 40))])
def test_late_processes_are_told_apart_from_those_that_they_connect(late):
    """A late process answers, so that values of its subtree arrive, and no time passes."""
    network = Network(40)
    network.arrive(set(range(40)) - late)
    network.deliver()
    network.nodes[0].expire("meeting", 0)
    network.deliver()
    for result in (each for n, each in enumerate(network.results()) if n not in late):
        assert result.late == [(number, 0) for number in sorted(late)]
    # They get the same result when they arrive at last, and nothing is left of it.
    assert network.now <= 3.0
    network.nodes[0].arrive("meeting", 1, [0], join)
    network.deliver()


@pytest.mark.parametrize("stopped", [1, 2, 39])
def test_a_stopped_process_is_named_and_not_those_that_it_connects(stopped):
    network = Network(40, stopped=(stopped,))
    network.arrive(set(range(40)) - {stopped})
    network.deliver()
    network.nodes[0].expire("meeting", 0)
    network.deliver()
    place = network.nodes[stopped].place
    result = network.nodes[0].take("meeting", 0)
    assert result.late == [(stopped, place.end - stopped - 1)]
    assert result.value == [n for n in range(40) if not stopped <= n < place.end]
    # The time for an answer of the last level is over before that of process 0.
    assert network.now <= network.nodes[0].place.height


def test_a_process_that_arrives_during_the_questions_is_not_lost():
    """Its answer and the question cross; the first message counts."""
    for seed in range(20):
        network = Network(13, seed=seed)
        network.arrive(set(range(13)) - {1, 12})
        network.deliver()
        network.nodes[0].expire("meeting", 0)
        network.arrive([1, 12])
        network.deliver()
        result = network.nodes[0].take("meeting", 0)
        present = set(result.value)
        assert present | {number for number, _ in result.late} == set(range(13))
        assert not present & {number for number, _ in result.late}


def test_the_first_of_two_posted_messages_counts_everywhere():
    for seed in range(10):
        network = Network(40, seed=seed)
        network.nodes[39].post("stop", "a")
        network.nodes[7].post("stop", "b")
        network.deliver()
        assert len({node.notices["stop"] for node in network.nodes}) == 1


@pytest.mark.parametrize("silent", [1, 2, 39])
def test_all_learn_which_process_is_silent(silent):
    network = Network(40, stopped=(silent,))
    others = [node for node in network.nodes if node.place.process != silent]
    for node in others:
        neighbors = (node.place.parent, *node.place.children)
        node.beat([silent] if silent in neighbors else [])
    network.deliver()
    assert {node.silent for node in others} == {frozenset({silent})}
    # It has recovered.
    network.stopped.clear()
    for _ in range(2):
        for node in network.nodes:
            node.beat([])
        network.deliver()
    assert {node.silent for node in network.nodes} == {frozenset()}


def test_merged_values_are_as_short_as_one():
    network = Network(121)
    network.arrive(range(121), value=lambda n: "failed" if n in (50, 100) else None, merge=first_known)
    network.deliver()
    assert {result.value for result in network.results()} == {"failed"}
