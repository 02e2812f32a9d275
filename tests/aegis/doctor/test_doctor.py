"""The doctor: facts that it reads, and findings from facts."""

import dataclasses
import pathlib

import pytest

from zaya_jax.aegis.doctor.doctor import examine, worst_by_name
from zaya_jax.aegis.doctor.facts import Disk, HostFacts, Speed
from zaya_jax.aegis.doctor.findings import BAD, CLUSTER, GOOD, NODE, SMALL, STATES, UNTESTED, WORSE, judge
from zaya_jax.aegis.doctor.host_facts import (
    COORDINATOR_PORTS,
    Gpu,
    HostClock,
    Limits,
    Nic,
    Ports,
    architecture,
    read_gpus,
    read_nics,
    read_ports,
    read_rocm_version,
)
from zaya_jax.aegis.doctor.software_checks import TRAINING_FLAGS
from zaya_jax.aegis.doctor.software_facts import Probe, RdmaTest, read_pingpong, read_probe, try_rdma
from zaya_jax.commands.doctor import main, read_speed

GPU = Gpu(architecture="gfx942", memory_bytes=192 * 2**30, may_be_used=True)
NIC = Nic(
    name="ionic_0", port=1, driver="ionic", state="ACTIVE", gigabits=400.0,
    link_downed=0, gid_index=3,
)  # fmt: skip
LAPTOP = HostFacts(
    host="laptop",
    versions={"python": "3.12.1", "jax": "0.12.0", "jaxlib": "0.12.0", "flax": "0.12.8"}
    | {"jax-rocm7-plugin": None, "jax-rocm7-pjrt": None},
    probe=Probe(platform="cpu", kinds=("cpu",)),
    refused_flags=None,
    rocm=None,
    gpus=(),
    nics=(),
    rdma=None,
    clock=HostClock(is_synchronised=True, max_error_seconds=0.01),
    clock_apart_seconds=None,
    shared_memory=2**33,
    limits=Limits(open_files=1_048_576, locked_bytes=2**23),
    ports=Ports(taken=(), first_ephemeral=32768, last_ephemeral=60999),
    memory_bytes=16 * 2**30,
    disk=Disk(folder="/runs", free_bytes=2**40, sync_worst=0.01, write_bandwidth=2e9),
    speed=None,
    environment={},
)


def finding(facts, name):
    (found,) = [each for each in examine(facts) if each.name == name]
    return found


def on_node(**changes):
    return dataclasses.replace(
        LAPTOP, gpus=(GPU,) * 8, nics=(NIC,) * 8, shared_memory=2**37,
        limits=Limits(open_files=1_048_576, locked_bytes=None), rocm="7.2.1-43", **changes,
    )  # fmt: skip


def test_a_laptop_can_train_only_small_models():
    small, node, cluster = judge(examine(LAPTOP))
    assert (small.use, small.state) == (SMALL, GOOD)
    assert (node.use, node.state, node.reasons) == (NODE, BAD, ("GPUs",))
    assert (cluster.use, cluster.state) == (CLUSTER, BAD)
    assert "use a node with MI300X" in finding(LAPTOP, "GPUs").action


@pytest.mark.parametrize(
    ("name", "changes", "state", "word"),
    [
        ("GPUs", {}, GOOD, ""),
        ("GPUs", {"gpus": (GPU,) * 7}, WORSE, "use all eight GPUs"),
        (
            "GPUs",
            {"gpus": (dataclasses.replace(GPU, may_be_used=False),) * 8},
            BAD,
            "groups video and render",
        ),
        ("GPUs", {"gpus": (dataclasses.replace(GPU, architecture="gfx90a"),) * 8}, WORSE, "gfx942"),
        ("NICs", {}, GOOD, ""),
        ("NICs", {"nics": (NIC,) * 7 + (dataclasses.replace(NIC, state="DOWN"),)}, BAD, r"ionic_0 (DOWN)"),
        ("NICs", {"nics": (NIC,) * 7 + (dataclasses.replace(NIC, link_downed=4),)}, WORSE, "4 times"),
        ("NICs", {"nics": ()}, BAD, "otherwise only TCP"),
        ("/dev/shm", {"shared_memory": 64 * 2**20}, BAD, "--shm-size 64G"),
        ("locked memory", {"limits": Limits(open_files=None, locked_bytes=2**16)}, BAD, "memlock=-1"),
        ("open files", {"limits": Limits(open_files=256, locked_bytes=None)}, BAD, "ulimit -n 65536"),
        ("open files", {"limits": Limits(open_files=4096, locked_bytes=None)}, WORSE, "ulimit -n 65536"),
        ("clock", {"clock_apart_seconds": 30.0}, BAD, "chrony"),
        ("clock", {"clock": None}, UNTESTED, "chronyc"),
        ("memory", {"memory_bytes": 2**29}, BAD, "batch_size"),
        ("disk", {"disk": None}, UNTESTED, "--no-disk"),
        ("disk", {"disk": dataclasses.replace(LAPTOP.disk, free_bytes=2**20)}, BAD, "free some space"),
        ("disk", {"disk": dataclasses.replace(LAPTOP.disk, sync_worst=2.0)}, WORSE, "zaya bench storage"),
        ("GEMM 8192^3", {"speed": Speed(gemm_flops=710e12)}, GOOD, ""),
        ("GEMM 8192^3", {"speed": Speed(gemm_flops=650e12)}, WORSE, "throttled"),
        ("GEMM 8192^3", {"speed": Speed(gemm_flops=500e12)}, BAD, "throttled"),
        ("HBM", {"speed": Speed(memory_bandwidth=4600e9)}, GOOD, ""),
        ("all-reduce of the node", {"speed": Speed(all_reduce_bandwidth=90e9)}, BAD, "xGMI"),
        # 60% of the measurement of a healthy node: 40% of its links are lost.
        ("all-reduce of the node", {"speed": Speed(all_reduce_bandwidth=0.6 * 315.7e9)}, BAD, "at least 304"),
        ("all-reduce of the node", {"speed": Speed(all_reduce_bandwidth=303e9)}, BAD, "xGMI"),
        ("all-reduce of the node", {"speed": Speed(all_reduce_bandwidth=304.1e9)}, GOOD, ""),
        ("all-reduce of the node", {"speed": Speed(all_reduce_bandwidth=315.7e9)}, GOOD, ""),
        # Between four GPUs three of seven links are used: 130 of 304.
        (
            "all-reduce of the node",
            {"gpus": (GPU,) * 4, "speed": Speed(all_reduce_bandwidth=125e9)},
            BAD,
            "130",
        ),
        (
            "all-reduce of the node",
            {"gpus": (GPU,) * 4, "speed": Speed(all_reduce_bandwidth=131e9)},
            GOOD,
            "",
        ),
        ("HBM", {"speed": Speed(failure="a GPU hangs")}, UNTESTED, "fix this failure first"),
    ],
)
def test_hardware_findings(name, changes, state, word):
    found = finding(dataclasses.replace(on_node(), **changes), name)
    assert (found.state, found.state == GOOD) == (state, found.action == "")
    assert word in found.sentence


VERSIONS = LAPTOP.versions | {"jax": "0.10.2", "jaxlib": "0.10.2"}
PLUGIN = {"jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"}
WHEELS = VERSIONS | {"jax": "0.11.1", "jaxlib": "0.11.1"}
EIGHT = Probe(platform="gpu", kinds=("AMD Instinct MI300X",) * 8, rccl="2.27.7")
POLLARA = {"RCCL_AINIC_ROCE": "1"}
WORKS = RdmaTest(name="ionic_0", megabits=190_000.0)


@pytest.mark.parametrize(
    ("name", "changes", "state", "word"),
    [
        ("Python", {"versions": VERSIONS | {"python": "3.10.12"}}, BAD, "install Python 3.11"),
        ("jax", {"versions": VERSIONS}, GOOD, ""),
        ("jax", {"versions": VERSIONS | {"jax": None}}, BAD, "jax not installed"),
        ("jax", {"versions": VERSIONS | {"jaxlib": "0.10.1"}}, BAD, "a jaxlib of the same version"),
        # 0.9 is before 0.10, though not as text.
        ("jax", {"versions": VERSIONS | {"jax": "0.9.2", "jaxlib": "0.9.2"}}, BAD, "jax>=0.10.2"),
        ("jax", {"versions": VERSIONS | {"jax": "0.13.0", "jaxlib": "0.13.0"}}, BAD, "<0.13"),
        ("ROCm plugin", {"versions": VERSIONS | PLUGIN}, GOOD, ""),
        (
            "ROCm plugin",
            {"versions": VERSIONS | PLUGIN | {"jax": "0.10.3"}},
            BAD,
            "install matching versions",
        ),
        ("devices of jax", {"probe": EIGHT}, GOOD, ""),
        ("devices of jax", {"probe": Probe(failure="boom")}, BAD, "boom"),
        ("devices of jax", {"probe": Probe(platform="cpu", kinds=("cpu",))}, BAD, "unset JAX_PLATFORMS"),
        (
            "devices of jax",
            {"probe": dataclasses.replace(EIGHT, kinds=EIGHT.kinds[:4])},
            BAD,
            "ROCR_VISIBLE_DEVICES",
        ),
        ("XLA_FLAGS", {}, GOOD, ""),
        ("XLA_FLAGS", {"probe": Probe(unknown_flags=("xla_gpu_x",))}, BAD, "refused: xla_gpu_x"),
        ("flags for training", {"environment": {"XLA_FLAGS": " ".join(TRAINING_FLAGS)}}, GOOD, ""),
        ("flags for training", {"environment": {}}, WORSE, TRAINING_FLAGS[0]),
        ("ROCm", {"rocm": "7.2.1-43"}, GOOD, ""),
        ("ROCm", {"rocm": None}, BAD, "no /opt/rocm"),
        ("ROCm", {"rocm": "6.4.3"}, BAD, "install ROCm 7"),
        ("ROCm", {"rocm": "7.14.0"}, WORSE, "64 to 512 MB"),
        ("ROCm", {"rocm": "7.14.1-55"}, WORSE, "TheRock #7903"),
        ("ROCm", {"rocm": None, "versions": WHEELS | {"rocm-sdk-core": "7.13.0"}}, GOOD, ""),
        ("ROCm", {"rocm": None, "versions": WHEELS | {"rocm-sdk-core": "7.14.0"}}, WORSE, "TheRock #7903"),
        ("ROCm", {"versions": WHEELS | {"rocm-sdk-core": "7.14.0"}}, WORSE, "another release's RCCL"),
        ("ROCm", {"rocm": None, "versions": WHEELS | {"rocm-sdk-core": "0.1.0"}}, BAD, "AMD's index"),
        (
            "ROCm",
            {"rocm": None, "versions": VERSIONS | {"rocm-sdk-core": "7.13.0"}},
            BAD,
            "jax 0.11.1 or later",
        ),
        ("RCCL", {"probe": EIGHT}, GOOD, ""),
        ("RCCL", {"probe": Probe(platform="gpu")}, BAD, "LD_LIBRARY_PATH"),
        ("network plugin", {"environment": POLLARA}, GOOD, ""),
        ("network plugin", {"environment": {}}, BAD, "set RCCL_AINIC_ROCE=1"),
        ("network plugin", {"environment": POLLARA, "rocm": "7.2.0"}, BAD, "install ROCm 7.2.1"),
        ("network plugin", {"environment": {"NCCL_NET_PLUGIN": "x.so"}, "rocm": "7.2.0"}, GOOD, ""),
        ("network plugin", {"nics": (dataclasses.replace(NIC, driver="mlx5_core"),) * 8}, GOOD, ""),
        ("RDMA", {"rdma": None}, UNTESTED, "install ibverbs-utils"),
        ("RDMA", {"rdma": ()}, BAD, "no active NIC"),
        ("RDMA", {"rdma": (WORKS,) * 8}, GOOD, ""),
        (
            "RDMA",
            {"rdma": (WORKS, RdmaTest(name="ionic_1", megabits=None, failure="no answer"))},
            BAD,
            "ionic_1: no answer;",
        ),
        (
            "ports",
            {"ports": dataclasses.replace(LAPTOP.ports, taken=tuple(COORDINATOR_PORTS))},
            BAD,
            "ss -ltn",
        ),
    ],
)
def test_software_findings(name, changes, state, word):
    found = finding(dataclasses.replace(on_node(), **changes), name)
    assert (found.state, found.state == GOOD) == (state, found.action == "")
    assert word in found.sentence


def test_unknown_flags_are_not_recommended():
    refused = tuple(flag.partition("=")[0].lstrip("-") for flag in TRAINING_FLAGS[1:])
    found = finding(on_node(refused_flags=refused), "flags for training")
    assert found.action == f'set XLA_FLAGS="{TRAINING_FLAGS[0]}"'


def test_the_worst_finding_of_several_hosts_names_them():
    slow = on_node(disk=dataclasses.replace(LAPTOP.disk, sync_worst=2.0))
    found = {"a": examine(on_node()), "b": examine(slow), "c": examine(slow)}
    worst = {finding.name: (finding.state, hosts) for finding, hosts in worst_by_name(found)}
    assert worst["disk"] == (WORSE, ["b", "c"])
    assert worst["memory"] == (GOOD, ["a", "b", "c"])


def files(root: pathlib.Path, texts: dict[str, str]) -> pathlib.Path:
    """Writes a tree of the kernel's files."""
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_gpus_are_read_from_the_drivers_list(tmp_path):
    nodes = "sys/class/kfd/kfd/topology/nodes"
    gpu = "simd_count 1216\ngfx_target_version 90402\ndrm_render_minor {}\n"
    root = files(
        tmp_path,
        {
            f"{nodes}/0/properties": "cpu_cores_count 96\nsimd_count 0\n",
            f"{nodes}/2/properties": gpu.format(128),
            f"{nodes}/2/mem_banks/0/properties": "heap_type 1\nsize_in_bytes 206141652992\n",
            f"{nodes}/2/mem_banks/1/properties": "heap_type 4\nsize_in_bytes 77\n",
            f"{nodes}/10/properties": gpu.format(129),
            f"{nodes}/11/properties": "",  # of another container
            "dev/kfd": "",
            "dev/dri/renderD128": "",
            "opt/rocm/.info/version": "7.2.1-43\n",
        },
    )
    first, second = read_gpus(root)
    assert first == Gpu(architecture="gfx942", memory_bytes=206_141_652_992, may_be_used=True)
    assert (second.memory_bytes, second.may_be_used) == (0, False)
    assert read_rocm_version(root) == "7.2.1-43"
    assert read_gpus(tmp_path / "nowhere") == ()


@pytest.mark.parametrize(("version", "name"), [(90402, "gfx942"), (90010, "gfx90a"), (110000, "gfx1100")])
def test_architecture_names(version, name):
    assert architecture(version) == name


def test_nics_are_read_with_their_links(tmp_path):
    port = "sys/class/infiniband/{}/ports/1"
    a, b = port.format("bnxt_re0"), port.format("mlx5_1")
    root = files(
        tmp_path,
        {
            f"{a}/state": "4: ACTIVE\n",
            f"{a}/rate": "400 Gb/sec (4X NDR)\n",
            f"{a}/counters/link_downed": "3\n",
            f"{a}/gid_attrs/types/0": "IB/RoCE v1\n",
            f"{a}/gid_attrs/types/1": "RoCE v2\n",
            f"{a}/gids/1": "fe80:0000:0000:0000:0000:0000:0000:0001\n",
            f"{a}/gid_attrs/types/3": "RoCE v2\n",
            f"{a}/gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001\n",
            f"{b}/state": "1: DOWN\n",
            f"{b}/rate": "",
        },
    )
    up, down = read_nics(root)
    assert (up.name, up.state, up.gigabits, up.link_downed, up.gid_index) == (
        "bnxt_re0",
        "ACTIVE",
        400.0,
        3,
        3,
    )
    assert (down.state, down.gigabits, down.gid_index) == ("DOWN", 0.0, None)


def test_the_ephemeral_range_is_read_from_the_kernel(tmp_path):
    root = files(tmp_path, {"proc/sys/net/ipv4/ip_local_port_range": "1024\t65535\n"})
    assert (read_ports(root).first_ephemeral, read_ports(root).last_ephemeral) == (1024, 65535)
    assert finding(dataclasses.replace(LAPTOP, ports=read_ports(root)), "ports").state == WORSE


PINGPONG = """\
  local address:  LID 0x0000, QPN 0x000047, PSN 0x6a3f1c, GID ::ffff:10.0.0.1
  remote address: LID 0x0000, QPN 0x000048, PSN 0x2b9e07, GID ::ffff:10.0.0.1
65536000 bytes in 0.01 seconds = 94325.88 Mbit/sec
1000 iters in 0.01 seconds = 5.56 usec/iter
"""
"""Output in the format of rdma-core's `ibv_rc_pingpong`."""


def test_pingpong_output_is_parsed():
    assert read_pingpong("ionic_0", PINGPONG, "") == RdmaTest(name="ionic_0", megabits=94_325.88)
    failed = read_pingpong("ionic_0", "  local address:\n", "Failed to modify QP to RTR\nCouldn't connect\n")
    assert (failed.megabits, failed.failure) == (None, "Couldn't connect")
    assert read_pingpong("ionic_0", "", "").failure == "no output"


def test_rdma_is_tested_on_each_active_port(tmp_path):
    """With a script instead of the tool, which prints a rate that depends on the name of the device."""
    tool = tmp_path / "pingpong"
    tool.write_text('#!/bin/sh\ncase "$*" in *127.0.0.1*) echo "1 bytes = ${2#ionic_}.5 Mbit/sec";; esac\n')
    tool.chmod(0o755)
    nics = [dataclasses.replace(NIC, name="ionic_7"), dataclasses.replace(NIC, name="ionic_8", state="DOWN")]
    assert try_rdma(nics, tool=str(tool)) == (RdmaTest(name="ionic_7", megabits=7.5),)
    assert try_rdma(nics, tool=str(tmp_path / "none")) is None


def test_unknown_flags_are_parsed():
    complaint = "F0000 parse_flags_from_env.cc:226] Unknown flags in XLA_FLAGS: --xla_gpu_x=true --xla_y=1\n"
    assert read_probe(-6, "", complaint).unknown_flags == ("xla_gpu_x", "xla_y")


def test_failures_of_probes_are_parsed():
    assert read_probe(0, 'noise\n{"platform": "cpu", "kinds": ["cpu"], "rccl": null}\n', "").kinds == ("cpu",)
    assert "boom" in read_probe(1, "", "Traceback\nRuntimeError: boom\n").failure
    assert read_speed(137, "", "").failure == "the measurement ended with exit code 137"


@pytest.mark.slow
def test_the_command_on_this_machine(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([f"--folder={tmp_path}", "--use=node", f"--json={tmp_path / 'doctor.json'}"])
    assert ended.value.code == 3
    output = capsys.readouterr().out
    assert "train on the GPUs of this node: not yet: GPUs" in output
    assert "what to do:\n1. " in output
    assert any(state in output for state in STATES)
    assert (tmp_path / "doctor.json").is_file()
