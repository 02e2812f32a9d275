"""Comparison of values between processes, which are simulated by threads."""

import concurrent.futures
import threading
import types

import pytest

from zaya_jax.errors import USER_ERROR, exit_code_of
from zaya_jax.parallel.processes import consistency
from zaya_jax.parallel.processes.errors import CollectiveError


class Processes:
    """Replacement for `hosts` in which each thread is a process."""

    def __init__(self, count: int):
        self._count, self._own = count, threading.local()
        self._barrier = threading.Barrier(count)
        self._said: dict[str, dict[int, object]] = {}
        self.num_processes = lambda: count
        self.process = lambda: self._own.number
        self.describe = lambda number: f"process {number} on n{number}"

    def become(self, number: int) -> None:
        self._own.number = number

    def reduce(self, name: str, value: object, merge) -> object:
        self._said.setdefault(name, {})[self._own.number] = value
        self._barrier.wait(timeout=10)
        values = [self._said[name][number] for number in range(self._count)]
        # As in a tree: some values are merged before the others.
        middle = self._count // 2
        return merge([merge(values[:middle]), merge(values[middle:])])


def compare(monkeypatch, values: list[dict[str, str]]) -> list[CollectiveError | None]:
    """Returns the error of each process."""
    processes = Processes(len(values))
    monkeypatch.setattr(consistency, "hosts", types.SimpleNamespace(**{
        name: getattr(processes, name) for name in ("num_processes", "process", "describe", "reduce")
    }))  # fmt: skip

    def run(number: int) -> CollectiveError | None:
        processes.become(number)
        try:
            consistency.require_same("config", values[number])
        except CollectiveError as error:
            return error
        return None

    with concurrent.futures.ThreadPoolExecutor(len(values)) as threads:
        return list(threads.map(run, range(len(values))))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_equal_values_pass(count, monkeypatch):
    # The order of fields does not matter.
    values = [dict(sorted({"a": "1", "b": "2"}.items(), reverse=number % 2 > 0)) for number in range(count)]
    assert compare(monkeypatch, values) == [None] * count


@pytest.mark.parametrize(
    ("count", "odd", "changed", "sentence"),
    [
        (2, 1, {"rate": "2"}, "process 1 on n1 has rate 2 instead of 1 on process 0 on n0"),
        (4, 3, {"seed": "7"}, "process 3 on n3 has seed 7 instead of 0"),
        # The majority is the reference, not process 0.
        (4, 0, {"rate": "2"}, "process 0 on n0 has rate 2 instead of 1; most are as process 1 on n1"),
        (3, 2, {"new": "x"}, "process 2 on n2 has new x instead of missing"),
        (4, 1, {"rate": "2", "seed": "3"}, "process 1 on n1 has rate 2 instead of 1, seed 3 instead of 0"),
    ],
)
def test_the_different_process_and_field_are_named_in_all(count, odd, changed, sentence, monkeypatch):
    values = [{"rate": "1", "seed": "0"} for _ in range(count)]
    values[odd] |= changed
    errors = compare(monkeypatch, values)
    for error in errors:
        assert error is not None
        assert error.is_printed_here
        assert exit_code_of(error) == USER_ERROR
        assert sentence in str(error)
    others = {number for number in range(count) if f"process {number} on n{number} has" in str(errors[0])}
    assert others == {odd}


def test_long_lists_of_differences_are_shortened(monkeypatch):
    values = [{str(field): str(number) for field in range(9)} for number in range(12)]
    (error, *_) = compare(monkeypatch, values)
    assert "and 5 more fields" in str(error)
    assert "3 more processes differ" in str(error)
