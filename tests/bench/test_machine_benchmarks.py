"""Small measurements of this machine's products, memory and storage, their advice, and their use by a
plan.
"""

import json
import math

import pytest
from rich.console import Console

from zaya_jax.bench import command, measure
from zaya_jax.bench.collectives.advice import advice, message_times, slow_sizes
from zaya_jax.bench.collectives.device_groups import by_node, groupings
from zaya_jax.bench.kernels import gemm, memory_passes
from zaya_jax.bench.storage import disk
from zaya_jax.bench.storage.disk import StorageTimes
from zaya_jax.plan.measured import (
    ALL,
    CollectiveTimes,
    Curve,
    Machine,
    PassTime,
    PassTimes,
    ProductTime,
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
        ValueError, match="hosts have different numbers of devices: a 6, b 2; all must have the same"
    ):
        by_node(devices, ["a", "a", "a", "b"])
    with pytest.raises(ValueError, match="--devices-per-node is 3; it must divide the number of devices, 8"):
        by_node(devices, ["a"] * 4, devices_per_node=3)


def test_rails_contain_the_devices_with_equal_local_numbers():
    result = {each.layout: each.groups for each in groupings(2, 4)}
    assert result["rails"] == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert result["one rail"] == ((0, 4),)
    assert result["2 of a node"] == ((0, 1), (4, 5))
    assert [each.layout for each in groupings(1, 8)] == [ALL, "2 of a node", "4 of a node"]
    with pytest.raises(ValueError, match="collectives need at least 2 devices"):
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


def test_advice_to_combine_messages_dominated_by_latency():
    result = gathered(*((2**power, 1e-3 + 2**power * 1e-9) for power in range(10, 25)))
    sent = {"all_gather": {f"bucket {number}": 2**14 for number in range(64)}}
    (times,) = message_times(result, sent)
    assert (times.count, times.num_bytes, times.short_count) == (64, 2**20, 64)
    assert times.seconds == pytest.approx(64 * (1e-3 + 2**14 * 1e-9))
    (sentence,) = advice(result, sent)
    assert f"set XLA's combine threshold for it to {2**20}" in " ".join(sentence.split())


def test_a_size_slower_than_a_smaller_one_is_named():
    curve = Curve("all_gather", 8, (1000, 2000, 4000, 8000), (1.0, 1.5, 8.0, 5.0))
    assert slow_sizes(curve) == {4000: pytest.approx(500 / (2000 / 1.5))}
    assert "slower than a smaller message" in " ".join(
        " ".join(advice(gathered((1000, 1.0), (2000, 1.5), (4000, 8.0)), {})).split()
    )


def product(name, seconds, *, rows=256, depth=100):
    return ProductTime(name=name, rows=rows, depth=depth, columns=256, count=1, seconds=seconds)


BEST = product("best", 1.0, depth=1000)


def products_advice(*result):
    return gemm.advice(ProductTimes(machine=MACHINE, dtype="float32", products=(BEST, *result)))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ((), "no product is below 50% of the best one's rate"),
        ((product("keys", 0.19),), "no product is below"),
        # A tenth of the best product's FLOPs in the same time.
        (
            (product("keys", 1.0), product("keys, padded", 0.6, depth=256)),
            "keys reaches 10% of the best product's rate; padded to 256 x 256 x 256 it takes 40% less time",
        ),
        # Twice the rows in 1.2 times the time.
        (
            (product("keys", 1.0), product("keys, 2 x rows", 1.2, rows=512)),
            "with a larger micro-batch, twice its rows, a row takes 40% less time",
        ),
        (
            (product("logits of a chunk", 1.0), product("logits of a chunk, 2 x rows", 1.2, rows=512)),
            "with a larger execution.loss_chunk",
        ),
        ((product("keys", 1.0), product("keys, padded", 0.97, depth=256)), "no variant helps"),
        # Padded rows do no useful work: 0.9 of the time for 200 rows, not for 256.
        (
            (product("keys", 1.0, rows=200), product("keys, padded", 0.9, depth=256)),
            "takes 10% less time",
        ),
        (
            (product("down of all experts", 0.1), product("down of all experts, 1 row more", 0.2, rows=257)),
            "down of all experts: one more row takes 2.0 times as long",
        ),
    ],
)
def test_a_slow_product_has_advice_based_on_measurements(result, words):
    (sentence,) = products_advice(*result)
    assert words in sentence


def test_variants_are_achievable():
    def sides(name, rows, depth):
        made = gemm.variants(gemm.Gemm(name=name, rows=rows, depth=depth, columns=512))
        return {each.name.removeprefix(f"{name}, "): (each.rows, each.depth) for each in made}

    assert sides("keys", 257, 100) == {"padded": (512, 256), "2 x rows": (514, 100)}
    assert sides("up of all experts", 256, 256) == {"2 x rows": (512, 256), "1 row more": (257, 256)}
    # The optimizer's rows are those of the weights: no setting doubles them.
    assert sides("Newton-Schulz, Gram", 256, 256) == {}


def test_names_of_products_are_complete_on_a_narrow_terminal(capsys):
    experts = ProductTime(
        name="gate and up of all experts", rows=131_072, depth=2048, columns=4096, count=16, seconds=0.12
    )
    result = ProductTimes(machine=MACHINE, dtype="bfloat16", products=(experts,))
    Console(width=80).print(gemm.table(result))
    printed = capsys.readouterr().out
    assert "│ gate and up of all experts " in printed
    assert "│   16 of 131,072 x 2,048 x 4,096 " in printed
    assert max(map(len, printed.splitlines())) <= 80


def passes(*bandwidths):
    result = [
        PassTime(operation="add", array_bytes=2 ** (20 + number), moved_bytes=10**9, seconds=1e9 / bandwidth)
        for number, bandwidth in enumerate(bandwidths)
    ]
    return PassTimes(machine=MACHINE, passes=tuple(result))


def test_memory_bandwidth_is_that_of_the_largest_arrays():
    assert memory_passes.conclusion(passes(30e9, 20e9, 10e9)) == (
        "the memory reaches 10.0 GB/s; add of 1.00 MiB reaches 3.0 times that in a cache: work that fits "
        "there is worth fusing"
    )
    assert memory_passes.conclusion(passes(10e9, 12e9)) == "the memory reaches 12.0 GB/s"


@pytest.mark.parametrize(
    ("changes", "sentences"),
    [
        ({}, []),
        ({"write_bandwidth": 0.1e9}, ["writing reaches 0.10 GB/s, below 0.5"]),
        ({"sync_worst": 0.3}, ["the slowest fsync took 300 ms"]),
        ({"reads_per_second": 500_000.0}, ["reads came from memory"]),
        ({"reads_per_second": 9000.0}, ["one reader gets 9,000 pages per second"]),
    ],
)
def test_advice_on_a_disk(changes, sentences):
    sound = {
        "folder": "/runs", "num_bytes": 2**30, "sync_median": 1e-3, "sync_worst": 1e-2,
        "write_bandwidth": 2e9, "read_bandwidth": 3e9, "reads_per_second": 80_000.0, "files_per_second": 9e2,
    }  # fmt: skip
    saving, *others = disk.advice(StorageTimes(**(sound | changes)))
    # 88 GB at that bandwidth.
    assert f"would take {88e9 / (sound | changes)['write_bandwidth']:,.0f} s from this host" in saving
    assert len(others) == len(sentences)
    assert all(words in sentence for words, sentence in zip(sentences, others, strict=True))


@pytest.fixture
def brief_rounds(monkeypatch):
    """Shortens the rounds of timings whose values no test reads."""
    monkeypatch.setattr(measure, "ROUND_SECONDS", 0.005)


@pytest.mark.slow
@pytest.mark.usefixtures("brief_rounds")
def test_products_are_timed_and_read_by_a_plan(tmp_path, capsys):
    # At the probe's rate of 0.13 GFLOP in 0.5 s, even a machine that only reaches 0.3 GFLOP/s measures the
    # larger of the two products below; 8,192 cubed is measured from 2,200 GFLOP/s on.
    file = tmp_path / "gemm.json"
    command.main(["gemm", "--config=configs/tiny.py", "--gpus=1", "--call-seconds=0.5", f"--json={file}"])
    result = read_measured(file)
    assert isinstance(result, ProductTimes)
    names = {each.name for each in result.products}
    assert {"queries", "down of all experts"} <= names
    assert all(math.isfinite(each.rate) and each.rate > 1e6 for each in result.products)
    assert "queries" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.usefixtures("brief_rounds")
def test_memory_is_timed_and_read_by_a_plan(tmp_path):
    file = tmp_path / "hbm.json"
    command.main(["hbm", "--max-mib=4", f"--json={file}"])
    result = read_measured(file)
    assert isinstance(result, PassTimes)
    assert max(each.array_bytes for each in result.passes) == 4 * 2**20
    assert 1e8 < result.bandwidth < 1e13


@pytest.mark.slow
def test_storage_is_timed_and_no_file_remains(tmp_path):
    file = tmp_path / "storage.json"
    folder = tmp_path / "disk"
    folder.mkdir()
    command.main(["storage", f"--folder={folder}", "--gib=0.01", f"--json={file}"])
    assert list(folder.iterdir()) == []
    result = json.loads(file.read_text())
    assert set(StorageTimes.__dataclass_fields__) <= set(result)
    assert result["write_bandwidth"] > 1e6


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["collectives", "--max-size=64XB"], '--max-size is "64XB"; it must be a whole number with B, KiB'),
        (["storage", "--folder=/nowhere"], "/nowhere"),
        (["storage", "--gib=0"], "--gib is 0"),
        (["storage", "--gib=1e9"], r"--gib is 1e\+09; .* has .* free, and half of it is the limit"),
        (["hbm", "--max-mib=0"], "--max-mib is 0"),
        (["gemm", "--gpus=3"], "--gpus is 3; it must divide the batch of 4096"),
        (["gemm", "--call-seconds=0"], r"--call-seconds is 0.0; it must be above 0"),
        (["gemm", "--json=/nowhere/gemm.json"], "/nowhere"),
    ],
)
def test_invalid_options_are_rejected(words, sentence):
    with pytest.raises(ValueError, match=sentence):
        command.main(words)
