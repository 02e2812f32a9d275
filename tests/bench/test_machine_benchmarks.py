"""Products, memory and storage of this machine, small: what is timed, what is advised, what a plan reads."""

import json
import math

import pytest

from zaya_jax.bench import command
from zaya_jax.bench.collective_advice import advice, message_times, slow_sizes
from zaya_jax.bench.groupings import by_node, groupings
from zaya_jax.bench.storage import StorageTimes
from zaya_jax.plan.measured import (
    ALL,
    CollectiveTimes,
    Curve,
    Machine,
    PassTimes,
    ProductTimes,
    Timing,
    read_measured,
)

MACHINE = Machine(platform="cpu", device="cpu", hosts=("a",), jax="0.10", date="2026-11-23")


class Device:
    """A device of a process."""

    def __init__(self, number, process):
        self.id, self.process_index = number, process

    def __repr__(self):
        return f"{self.id}"


def numbers(nodes):
    return [[device.id for device in node] for node in nodes]


def test_devices_are_grouped_by_host_in_the_order_of_processes():
    devices = [Device(number, number // 2) for number in range(8)]
    assert numbers(by_node(devices, ["a", "b", "a", "b"])) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert numbers(by_node(devices, ["a"] * 4, devices_per_node=2)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    with pytest.raises(
        ValueError, match="hosts have unequally many devices: a 6, b 2; each must have as many"
    ):
        by_node(devices, ["a", "a", "a", "b"])
    with pytest.raises(ValueError, match="--devices-per-node is 3; it must divide the 8 devices"):
        by_node(devices, ["a"] * 4, devices_per_node=3)


def test_rails_have_the_devices_of_one_number():
    found = {each.layout: each.groups for each in groupings(2, 4)}
    assert found["rails"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert found["one rail"] == ((0, 4),)
    assert found["2 of a node"] == ((0, 1), (4, 5))
    assert [each.layout for each in groupings(1, 8)] == [ALL, "2 of a node", "4 of a node"]
    with pytest.raises(ValueError, match="there is one device, which exchanges nothing"):
        groupings(1, 1)


def gathered(*timings):
    """All-gathers among 8 devices of one node."""
    return CollectiveTimes(
        machine=MACHINE, num_processes=1, num_nodes=1, devices_per_node=8,
        timings=tuple(
            Timing(layout=ALL, collective="all_gather", group_size=8, num_groups=1, num_bytes=size,
                   seconds=time)
            for size, time in timings
        ),
    )  # fmt: skip


def test_messages_that_are_mostly_latency_should_go_together():
    found = gathered(*((2**power, 1e-3 + 2**power * 1e-9) for power in range(10, 25)))
    sent = {"all_gather": {f"bucket {number}": 2**14 for number in range(64)}}
    (times,) = message_times(found, sent)
    assert (times.count, times.num_bytes, times.short_count) == (64, 2**20, 64)
    assert times.seconds == pytest.approx(64 * (1e-3 + 2**14 * 1e-9))
    (sentence,) = advice(found, sent)
    assert f"set XLA's combine threshold for it to {2**20}" in " ".join(sentence.split())


def test_a_size_that_is_slower_than_a_smaller_one_is_named():
    curve = Curve("all_gather", 8, (1000, 2000, 4000, 8000), (1.0, 1.5, 8.0, 5.0))
    assert slow_sizes(curve) == {4000: pytest.approx(500 / (2000 / 1.5))}
    assert "avoid such" in " ".join(
        " ".join(advice(gathered((1000, 1.0), (2000, 1.5), (4000, 8.0)), {})).split()
    )


@pytest.mark.slow
def test_products_are_timed_and_read_by_a_plan(tmp_path, capsys):
    file = tmp_path / "gemm.json"
    command.main(["gemm", "--config=configs/tiny.py", "--gpus=1", "--call-seconds=0.002", f"--json={file}"])
    found = read_measured(file)
    assert isinstance(found, ProductTimes)
    names = {each.name for each in found.products}
    assert {"queries", "down of all experts"} <= names
    assert all(math.isfinite(each.rate) and each.rate > 1e6 for each in found.products)
    assert "products in " in capsys.readouterr().out  # names are folded on a narrow terminal


@pytest.mark.slow
def test_memory_is_timed_and_read_by_a_plan(tmp_path):
    file = tmp_path / "hbm.json"
    command.main(["hbm", "--largest-mib=4", f"--json={file}"])
    found = read_measured(file)
    assert isinstance(found, PassTimes)
    assert max(each.array_bytes for each in found.passes) == 4 * 2**20
    assert 1e8 < found.bandwidth < 1e13


@pytest.mark.slow
def test_storage_is_timed_and_nothing_is_left(tmp_path):
    file = tmp_path / "storage.json"
    folder = tmp_path / "disk"
    folder.mkdir()
    command.main(["storage", f"--folder={folder}", "--gib=0.01", f"--json={file}"])
    assert list(folder.iterdir()) == []
    found = json.loads(file.read_text())
    assert set(StorageTimes.__dataclass_fields__) <= set(found)
    assert found["write_bandwidth"] > 1e6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["collectives", "--largest=64XB"], '--largest is "64XB"; it must be a whole number with B, KiB'),
        (["storage", "--folder=/nowhere"], "/nowhere"),
        (["hbm", "--largest-mib=0"], "--largest-mib is 0"),
    ],
)
def test_what_cannot_be_measured_is_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        command.main(words)
