"""Measurements: fitted lines, bandwidths, files, and a plan that uses them."""

import dataclasses
import json

import numpy as np
import pytest

from zaya_jax.options import load_config
from zaya_jax.plan.arithmetic import communication, float32_flops, step_flops, step_seconds
from zaya_jax.plan.command import main
from zaya_jax.plan.devices import Cluster, cluster_as_measured
from zaya_jax.plan.gpus import MI300X
from zaya_jax.plan.links import bus_factor
from zaya_jax.plan.measured import (
    ALL,
    IN_NODE,
    RAILS,
    CollectiveTimes,
    Curve,
    Machine,
    PassTime,
    PassTimes,
    ProductTime,
    ProductTimes,
    Timing,
    fit_line,
    read_measured,
)
from zaya_jax.plan.shares import with_execution

MACHINE = Machine(platform="cpu", device="cpu", hosts=("a", "b"), jax="0.10", date="2026-11-23")
SIZES = [2**power for power in range(10, 31, 2)]
LATENCY, BANDWIDTH = 20e-6, 100e9
"""Latency of the made-up links in seconds."""


def times(*, nodes=2, devices_per_node=4, scale=1.0):
    """Collectives whose time is a latency plus the time of their bytes."""
    layouts = {
        IN_NODE: (devices_per_node, nodes),
        RAILS: (nodes, devices_per_node),
        ALL: (nodes * devices_per_node, 1),
    }
    return CollectiveTimes(
        machine=MACHINE,
        num_processes=nodes,
        num_nodes=nodes,
        devices_per_node=devices_per_node,
        timings=tuple(
            Timing(
                layout=layout,
                collective=collective,
                group_size=size,
                num_groups=groups,
                num_bytes=num_bytes,
                seconds=scale * (LATENCY + num_bytes * bus_factor(collective, size) / BANDWIDTH),
            )
            for layout, (size, groups) in layouts.items()
            for collective in ("reduce_scatter", "all_gather", "all_reduce")
            for num_bytes in SIZES
        ),
    )


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_a_fitted_line_equals_the_original(noise):
    random = np.random.default_rng(3)
    seconds = [(LATENCY + size / BANDWIDTH) * (1 + noise * random.uniform(-1, 1)) for size in SIZES]
    line = fit_line(SIZES, seconds)
    assert line.latency_seconds == pytest.approx(LATENCY, rel=2 * noise + 1e-9)
    assert 1 / line.seconds_per_byte == pytest.approx(BANDWIDTH, rel=2 * noise + 1e-9)
    assert line.typical_error <= noise + 1e-9
    assert line.half_bytes == pytest.approx(LATENCY * BANDWIDTH, rel=5 * noise + 1e-9)


@pytest.mark.parametrize("seconds", [[1e-3, 0.9e-3, 1.1e-3], [1e-6, 4e-6, 20e-6]])
def test_no_part_of_a_line_is_below_zero(seconds):
    line = fit_line([1000, 4000, 16_000], seconds)
    assert line.latency_seconds >= 0
    assert line.seconds_per_byte >= 0
    # No other line has a smaller error.
    errors = [sum((line.seconds(s) / t - 1) ** 2 for s, t in zip([1000, 4000, 16_000], seconds, strict=True))]
    for latency in np.linspace(0, 2e-3, 41):
        for per_byte in np.linspace(0, 2e-9, 41):
            other = [
                (latency + s * per_byte) / t - 1 for s, t in zip([1000, 4000, 16_000], seconds, strict=True)
            ]
            errors.append(sum(error**2 for error in other))
    assert errors[0] <= min(errors) + 1e-9


def test_bus_bandwidth_is_that_of_nccl_tests():
    """Eight devices and 8 bytes in a second: 2 * 7/8, 7/8, 7/8, 7/8, 1 and 1 times the algorithm's."""
    for collective, factor in (
        ("all_reduce", 14 / 8), ("reduce_scatter", 7 / 8), ("all_gather", 7 / 8),
        ("all_to_all", 7 / 8), ("broadcast", 1), ("permute", 1),
    ):  # fmt: skip
        timing = Timing(
            layout=ALL, collective=collective, group_size=8, num_groups=1, num_bytes=8, seconds=1.0
        )
        assert timing.algorithm_bandwidth == 8
        assert timing.bus_bandwidth == 8 * factor


def test_a_curve_between_and_beyond_its_sizes():
    curve = Curve("all_gather", 8, (1000, 4000, 16_000), (1.0, 2.0, 8.0))
    assert curve.at(1) == 1.0
    assert curve.at(4000) == pytest.approx(2.0)
    assert curve.at(2000) == pytest.approx(2**0.5)
    assert curve.at(64_000) == pytest.approx(32.0)
    assert curve.best_bus_bandwidth == pytest.approx(4000 * 7 / 8 / 2)


@pytest.fixture(scope="module")
def zaya1_8b():
    return load_config("configs/zaya1_8b.py", [])


def test_links_measured_at_the_data_sheets_rate(zaya1_8b):
    """A node with equal links between all pairs of devices, without latency."""
    bandwidth = 7 * MI300X.link_bandwidth
    result = CollectiveTimes(
        machine=MACHINE, num_processes=1, num_nodes=1, devices_per_node=8,
        timings=tuple(
            Timing(layout=ALL, collective=name, group_size=8, num_groups=1, num_bytes=size,
                   seconds=size * bus_factor(name, 8) / bandwidth)
            for name in ("reduce_scatter", "all_gather") for size in SIZES
        ),
    )  # fmt: skip
    measured, resources = cluster_as_measured(MI300X, 1, 8, [result])
    assert resources == ("links in the node",)
    config = with_execution(zaya1_8b, node_devices=1)
    ours = communication(config, measured)
    assert ours.link_seconds == pytest.approx(
        (ours.reduced_bytes + ours.gathered_bytes) * 7 / 8 / bandwidth, rel=1e-6
    )
    published = communication(config, Cluster(device=MI300X, nodes=1, gpus_per_node=8))
    assert ours.link_seconds < 0.75 * published.link_seconds


def test_measurements_replace_data_sheet_figures(zaya1_8b):
    products = ProductTimes(
        machine=MACHINE, dtype="bfloat16",
        products=(ProductTime(name="a", rows=1000, depth=1000, columns=1000, count=1, seconds=1e-5),),
    )  # fmt: skip
    passes = PassTimes(
        machine=MACHINE,
        passes=(
            PassTime(operation="copy", array_bytes=10, moved_bytes=20, seconds=1e-12),  # in a cache
            PassTime(operation="copy", array_bytes=1000, moved_bytes=2000, seconds=1e-9),
        ),
    )
    files = [products, passes, times(nodes=2, devices_per_node=8)]
    measured, resources = cluster_as_measured(MI300X, 2, 8, files)
    assert set(resources) == {"matrix units", "memory", "links in the node", "network"}
    paper = Cluster(device=MI300X, nodes=2, gpus_per_node=8)
    ours, theirs = step_seconds(zaya1_8b, measured), step_seconds(zaya1_8b, paper)
    single = float32_flops(zaya1_8b, 16)
    short = step_flops(zaya1_8b, 16) - single
    assert ours["matrix units"] == pytest.approx(short / 2e14 + single / MI300X.float32_flops)
    measured, _ = cluster_as_measured(MI300X, 2, 8, [dataclasses.replace(products, dtype="float32")])
    seconds = step_seconds(zaya1_8b, measured)["matrix units"]
    assert seconds == pytest.approx(short / MI300X.matrix_flops + single / 2e14)
    assert ours["memory"] == pytest.approx(theirs["memory"] * MI300X.memory_bandwidth / 2e12)
    slower, _ = cluster_as_measured(MI300X, 2, 8, [times(nodes=2, devices_per_node=8, scale=3.0)])
    for resource in ("links in the node", "network"):
        assert step_seconds(zaya1_8b, slower)[resource] == pytest.approx(3 * ours[resource], rel=1e-6)


def write(folder, result):
    file = folder / "measured.json"
    file.write_text(
        json.dumps(result.to_json() if isinstance(result, CollectiveTimes) else dataclasses.asdict(result))
    )
    return file


def test_a_file_is_read_as_it_was_written(tmp_path):
    assert read_measured(write(tmp_path, times())) == times()


def milliseconds(resource, printed):
    """The estimate of a resource in the table of a step's time."""
    cells = [
        [cell.strip() for cell in line.split("│")]
        for line in printed.partition("time of a step")[2].splitlines()
    ]
    (figure,) = [row[3] for row in cells if row[1:2] == [resource]]
    return float(figure.replace(",", ""))


def test_the_command_reports_measured_figures(zaya1_8b, tmp_path, capsys):
    words = [
        "--config=configs/zaya1_8b.py",
        "--nodes=2",
        "--gpus-per-node=4",
        "--config.execution.node_devices=1",
    ]
    main(words)
    paper = capsys.readouterr().out
    main([*words, f"--measured={write(tmp_path, times(scale=30.0))}"])
    printed = capsys.readouterr().out
    assert milliseconds("matrix units", printed) == milliseconds("matrix units", paper)
    # A thirtieth of 100 GB/s; of four devices in a node, and between two nodes. Latencies are negligible.
    sent = communication(
        with_execution(zaya1_8b, node_devices=1), Cluster(device=MI300X, nodes=2, gpus_per_node=4)
    )
    num_bytes = sent.reduced_bytes + sent.gathered_bytes
    for resource, on_the_wire in (("links in the node", 3 / 4), ("network", 1 / 4 * 1 / 2)):
        expected = 30e3 * num_bytes * on_the_wire / 100e9
        assert milliseconds(f"{resource}, as measured", printed) == pytest.approx(expected, rel=0.02)
    assert paper.splitlines()[-1].count("nothing measured") == 1
    assert "links in the node and network as measured" in printed.splitlines()[-1]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda values: {"what": "hub"},
            "has \"what\": 'hub'; it must be a file of zaya bench collectives",
        ),
        (lambda values: values | {"timings": []}, "it contains no measurement"),
        (lambda values: values | {"num_nodes": "two"}, "is not a valid file of zaya bench collectives"),
        (
            lambda values: values | {"timings": [values["timings"][0] | {"seconds": -1.0}]},
            "invalid measurement",
        ),
        (
            lambda values: values | {"timings": [values["timings"][0] | {"collective": "x"}]},
            'unknown collective "x"',
        ),
    ],
)
def test_invalid_files_are_rejected(damage, sentence, tmp_path):
    file = tmp_path / "spoilt.json"
    file.write_text(json.dumps(damage(times().to_json())))
    with pytest.raises(ValueError, match=sentence):
        read_measured(file)


def test_nodes_of_another_size_are_refused():
    with pytest.raises(
        ValueError, match="--gpus-per-node is 8, but collectives were measured with 4 devices"
    ):
        cluster_as_measured(MI300X, 2, 8, [times()])
