"""The agent: sensors on synthetic file trees, rotated logs, kernel records, and changes between samples."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import time

import pytest

from zaya_jax.aegis.agent import node_sensors
from zaya_jax.aegis.agent.agent import Agent
from zaya_jax.aegis.agent.kernel_log import KernelLog
from zaya_jax.aegis.agent.log_rules import ACTIONS, load_rules
from zaya_jax.aegis.agent.node_sensors import StorageProbe, parse_amd_smi, read_links, read_ports, read_ras
from zaya_jax.aegis.agent.sensor_changes import (
    SENSOR_CLASSES,
    GpuCounts,
    NodeChange,
    NodeState,
    PortState,
    find_changes,
)
from zaya_jax.aegis.agent.sightings import read_sightings


def write(root: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


PORT = "sys/class/infiniband/ionic_0/ports/1"
TREE = {
    f"{PORT}/state": "4: ACTIVE\n",
    f"{PORT}/counters/link_downed": "0\n",
    f"{PORT}/counters/port_xmit_data": "12345\n",
    f"{PORT}/hw_counters/local_ack_timeout_err": "7\n",
    f"{PORT}/hw_counters/rp_cnp_handled_ecn_err": "9\n",
    f"{PORT}/hw_counters/odd_err": "not a number\n",
    "sys/class/infiniband/ionic_0/device/net/enp1/name": "",
    "sys/class/net/enp1/device/vendor": "",
    "sys/class/net/enp1/operstate": "up\n",
    "sys/class/net/lo/operstate": "unknown\n",
    "sys/class/drm/card1/device/ras/umc_err_count": "ue: 0\nce: 3\n",
    "sys/class/drm/card1/device/ras/xgmi_wafl_err_count": "ue: 0\nce: 1\n",
}


def test_sensors_read_a_file_tree(tmp_path):
    root = write(tmp_path, TREE)
    assert read_ports(root) == {
        "ionic_0/1": PortState(True, {"link_downed": 0, "local_ack_timeout_err": 7}, "enp1"),
    }
    assert read_links(root) == {"enp1": True}
    assert read_ras(root) == {"card1": GpuCounts(uncorrectable=0, correctable=4, xgmi=1)}
    nowhere = tmp_path / "nowhere"
    assert (read_ports(nowhere), read_links(nowhere), read_ras(nowhere)) == ({}, {}, {})


def changes_between(before: NodeState, now: NodeState) -> list[tuple[str, str]]:
    return [(change.name, change.evidence) for change in find_changes(before, now)]


BEFORE = NodeState(
    ports={"ionic_0/1": PortState(True, {"rnr_nak_retry_err": 5}, "enp1")},
    links={"enp1": True},
    gpus={"gpu0": GpuCounts(uncorrectable=0, correctable=10, retired=0, xgmi=0, celsius=70.0)},
    free_share=0.5,
    clock_skew=0.0,
)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        ({}, []),
        (
            {"ports": {"ionic_0/1": PortState(False, {"rnr_nak_retry_err": 5}, "enp1")}},
            [("link_down", "ionic_0/1 is down")],
        ),
        ({"ports": {}}, [("nic_driver", "ionic_0/1 is gone, but enp1 reports that it is up")]),
        ({"ports": {}, "links": {}}, [("nic_driver", "ionic_0/1 is gone")]),
        (
            {"ports": {"ionic_0/1": PortState(True, {"rnr_nak_retry_err": 9}, "enp1")}},
            [("link_errors", "ionic_0/1: rnr_nak_retry_err increased by 4 to 9")],
        ),
        # A driver that was reloaded counts from 0: this is not an error.
        ({"ports": {"ionic_0/1": PortState(True, {"rnr_nak_retry_err": 1}, "enp1")}}, []),
        ({"links": {"enp1": False}}, [("link_down", "enp1 is down")]),
        (
            {"gpus": {"gpu0": GpuCounts(uncorrectable=1, correctable=10)}},
            [("ecc_uncorrectable", "gpu0: 1 more uncorrectable errors, 1 in total")],
        ),
        (
            {"gpus": {"gpu0": GpuCounts(correctable=14)}},
            [("ecc_correctable", "gpu0: 4 more correctable errors, 14 in total")],
        ),
        (
            {"gpus": {"gpu0": GpuCounts(retired=2)}},
            [("page_retired", "gpu0: 2 more retired pages, 2 in total")],
        ),
        (
            {"gpus": {"gpu0": GpuCounts(celsius=104.0)}},
            [("thermal", "gpu0: the hotspot temperature is 104 degrees Celsius")],
        ),
        ({"gpus": {"gpu1": GpuCounts(uncorrectable=3)}}, []),
        ({"free_share": 0.004}, [("disk_full", "0.40% of the run's file system is free")]),
        ({"write_seconds": 75.0}, [("storage_stall", "writing a small file takes 75 s so far")]),
        ({"clock_skew": -12.0}, [("clock", "this host's clock is -12.0 s from the file system's")]),
    ],
)
def test_changes_between_samples(now, expected):
    after = dataclasses.replace(BEFORE, **now)
    assert changes_between(BEFORE, after) == expected
    # A lasting condition is reported once; heat, which a rule counts, at each sample.
    lasting = [each for each in changes_between(after, after) if each[0] != "thermal"]
    assert lasting == []


def test_a_link_that_comes_back_is_reported():
    down = dataclasses.replace(BEFORE, links={"enp1": False})
    assert changes_between(down, BEFORE) == [("link_up", "enp1 is up")]


@pytest.mark.parametrize("wrapped", [False, True])
def test_amd_smi_output_is_parsed(wrapped):
    """With the fields of its documentation: a list of GPUs, which newer versions wrap in an object."""
    gpus = [
        {
            "gpu": 3,
            "ecc": {
                "total_correctable_count": 12,
                "total_uncorrectable_count": 1,
                "cache_correctable_count": "N/A",
            },
            "temperature": {"hotspot": {"value": 88, "unit": "C"}, "mem": {"value": 101, "unit": "C"}},
        },
        {"gpu": 4, "ecc": "N/A"},
        "damaged",
    ]
    found = parse_amd_smi({"gpu_data": gpus} if wrapped else gpus)
    assert found == {"gpu3": GpuCounts(uncorrectable=1, correctable=12, celsius=88.0), "gpu4": GpuCounts()}
    for nothing in (None, 3, [], {}, {"gpu_data": 1}):
        assert parse_amd_smi(nothing) == {}


def test_every_sensor_class_has_a_rule():
    rules = {rule.name: rule for rule in load_rules()}
    assert set(SENSOR_CLASSES) <= set(rules)
    assert all(rules[name].action in ACTIONS for name in SENSOR_CLASSES)
    with pytest.raises(ValueError, match='the rules have no class "nic_driver"'):
        Agent(pathlib.Path("unused"), [rule for rule in load_rules() if rule.name != "nic_driver"])


@pytest.fixture
def agent(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    monkeypatch.setattr(node_sensors, "AMD_SMI", "no-such-tool")
    (tmp_path / "old.log").write_text("n1: 3 uncorrectable errors detected\n")
    output = []
    found = Agent(
        tmp_path / "run", load_rules(), logs=[str(tmp_path / "*.log")], root=write(tmp_path / "root", TREE),
        kernel_log=tmp_path / "no device", report=output.append,
    )  # fmt: skip
    missing = f"agent: {tmp_path / 'no device'}: No such file or directory: kernel messages are not watched"
    assert output == [f"{missing}; reading them needs root"]
    return found


def names(tmp_path) -> list[str]:
    return [each.name for each in read_sightings(tmp_path / "run")]


def test_logs_are_followed_from_their_ends(agent, tmp_path):
    """A rotated log, a log that is created later, and an incomplete line."""
    agent.sample()
    assert names(tmp_path) == []
    log = tmp_path / "old.log"
    with log.open("a") as file:
        file.write("mlx5_core: Link is Down\nRAS: 1 uncorr")
    agent.sample()
    assert names(tmp_path) == ["link_down"]
    with log.open("a") as file:
        file.write("ectable errors detected\n")
    agent.sample()
    assert names(tmp_path) == ["link_down", "ecc_uncorrectable"]
    log.rename(tmp_path / "old.log.1")
    log.write_bytes(b"\xff\xfe nothing\nNo space left on device\n")
    agent.sample()
    assert names(tmp_path) == ["link_down", "ecc_uncorrectable", "disk_full"]
    assert {each.host for each in read_sightings(tmp_path / "run")} == {"n7"}


def test_a_lost_link_is_recorded_at_the_next_sample(agent, tmp_path):
    agent.sample()
    write(tmp_path / "root", {f"{PORT}/state": "1: DOWN\n", "sys/class/net/enp1/operstate": "down\n"})
    agent.sample()
    agent.sample()
    assert names(tmp_path) == ["link_down", "link_down"]
    (first, _) = read_sightings(tmp_path / "run")
    assert (first.action, first.source, first.evidence) == ("wait", "ionic_0/1", "ionic_0/1 is down")


def test_correctable_errors_are_recorded_at_their_rate(agent, tmp_path):
    """99 per hour have no effect."""
    agent.sample()
    for count, expected in ((100, []), (103, []), (104, ["ecc_correctable"]), (140, ["ecc_correctable"])):
        write(
            tmp_path / "root", {"sys/class/drm/card1/device/ras/umc_err_count": f"ue: 0\nce: {count - 1}\n"}
        )
        agent.sample()
        assert names(tmp_path) == expected


def test_kernel_records_are_read(tmp_path):
    os.mkfifo(tmp_path / "kmsg")
    reading = KernelLog(tmp_path / "kmsg")
    with open(tmp_path / "kmsg", "wb", buffering=0) as kernel:
        assert list(reading.new_lines()) == []
        kernel.write(b"6,1234,5678,-;amdgpu 0000:05:00.0: ring gfx timeout; more\n SUBSYSTEM=pci\n")
        assert list(reading.new_lines()) == ["amdgpu 0000:05:00.0: ring gfx timeout; more"]
    reading.close()


def test_a_hanging_disk_does_not_block_the_agent(tmp_path, monkeypatch):
    storage = StorageProbe(tmp_path, tmp_path / "n.clock")
    storage.start()
    deadline = time.monotonic() + 20
    while storage.latest()[0] is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    free, waits, skew = storage.latest()
    assert 0 < free <= 1
    assert waits < 10
    assert abs(skew) < 5
    monkeypatch.setattr(node_sensors.durable, "write", lambda *_: time.sleep(2))
    before = time.monotonic()
    storage.start()
    time.sleep(0.2)
    storage.start()
    assert 0.1 < storage.latest()[1] < time.monotonic() - before + 0.1


def test_the_command_ends_after_sigterm(tmp_path):
    words = [sys.executable, "-m", "zaya_jax.cli", "aegis", "agent", str(tmp_path)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    # The first sample writes this file, after the signal handlers are installed.
    deadline = time.monotonic() + 120
    while not list((tmp_path / "sightings").glob("*.clock")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.terminate()
    _, output = process.communicate(timeout=60)
    assert process.returncode == 0, output
    done = subprocess.run([*words[:-1], str(tmp_path / "nowhere")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not a folder; an agent writes into the folder of a run" in done.stderr


def test_an_increase_counts_once_per_error_up_to_a_maximum():
    (change,) = find_changes(
        NodeState(gpus={"g": GpuCounts(correctable=0)}), NodeState(gpus={"g": GpuCounts(correctable=10**9)})
    )
    assert change == NodeChange(
        "ecc_correctable", "g", f"g: {10**9} more correctable errors, {10**9} in total", 1000
    )
    assert json.dumps(dataclasses.asdict(change))
