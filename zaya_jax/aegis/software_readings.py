"""What software a host has, and what of it works: versions, jax and its devices, flags, RDMA's own test."""

import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from zaya_jax.aegis.host_readings import Nic

PACKAGES = ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt", "flax")
PROBE_SECONDS = 120.0
"""For jax to find its devices: on 8 GPUs it takes some tens."""
PINGPONG = "ibv_rc_pingpong"
PINGPONG_SECONDS = 20.0
"""For one device's test."""
_PINGPONG_PORT, _PINGPONG_BYTES = 18515, 65_536
_UNKNOWN_FLAG = re.compile(r"--(xla_\w+)")
_RATE = re.compile(r"=\s*([\d.]+)\s*Mbit/sec")
_LONE = re.compile(r"(JAX_(COORDINATOR|NUM_PROCESSES|PROCESS_ID)|SLURM_|JOB_COMPLETION)")
"""Variables by which a process would take itself for one of many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """What jax found in a process of its own.

    Attributes:
      platform: as jax calls it; "" if it found none.
      kinds: of its devices.
      rccl: version of the communication library; None without.
      unknown_flags: of XLA_FLAGS, those that XLA refused.
      failure: the last line of what it complained of; "" if it did not.
    """

    platform: str = ""
    kinds: tuple[str, ...] = ()
    rccl: str | None = None
    unknown_flags: tuple[str, ...] = ()
    failure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RdmaTest:
    """The test of one device: megabits a second, or why there are none."""

    name: str
    megabits: float | None
    failure: str = ""


def read_versions() -> dict[str, str | None]:
    """Versions of Python and of what jax consists of; None of what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def lone_environment(environment: Mapping[str, str], **changes: str) -> dict[str, str]:
    """The environment of a process that is to be alone, whatever group this one belongs to."""
    return {name: value for name, value in environment.items() if not _LONE.match(name)} | changes


def probe_jax(environment: Mapping[str, str], *, limit_seconds: float = PROBE_SECONDS) -> Probe:
    """What jax finds with an environment.

    Args:
      environment: of the process that looks.
      limit_seconds: for it.
    """
    command = [sys.executable, "-m", "zaya_jax.aegis.probe"]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Probe(failure=f"jax found no devices within {limit_seconds:.0f} s")
    return read_probe(done.returncode, done.stdout, done.stderr)


def read_probe(code: int, stdout: str, stderr: str) -> Probe:
    """What the output of a process of `zaya_jax.aegis.probe` says."""
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        found = json.loads(lines[-1])
        return Probe(platform=found["platform"], kinds=tuple(found["kinds"]), rccl=found["rccl"])
    complaints = [line for line in stderr.splitlines() if line.strip()]
    about_flags = [line for line in complaints if "XLA_FLAGS" in line]
    flags = tuple(dict.fromkeys(flag for line in about_flags for flag in _UNKNOWN_FLAG.findall(line)))
    last = (about_flags or complaints or [f"it ended with exit code {code}"])[-1]
    return Probe(unknown_flags=flags, failure=last.strip())


def try_rdma(nics: Sequence[Nic], *, tool: str = PINGPONG) -> tuple[RdmaTest, ...] | None:
    """Has each device that is up send to itself by RDMA; None where the tool is missing.

    Through the NIC and its driver, but not over a cable: what is between nodes, the collectives' bench tests.

    Args:
      nics: of this host.
      tool: `ibv_rc_pingpong` of rdma-core, or what stands for it.
    """
    if shutil.which(tool) is None:
        return None
    return tuple(_ping_itself(nic, tool) for nic in nics if nic.state == "ACTIVE")


def _ping_itself(nic: Nic, tool: str) -> RdmaTest:
    words = [tool, "-d", nic.name, "-i", str(nic.port), "-s", str(_PINGPONG_BYTES), "-p", str(_PINGPONG_PORT)]
    words += [] if nic.gid_index is None else ["-g", str(nic.gid_index)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # it says nothing when it begins to listen
        client = subprocess.run(
            [*words, "127.0.0.1"], capture_output=True, text=True, timeout=PINGPONG_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return RdmaTest(name=nic.name, megabits=None, failure=f"no answer within {PINGPONG_SECONDS:.0f} s")
    finally:
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()
    return read_pingpong(nic.name, client.stdout, client.stderr)


def read_pingpong(name: str, stdout: str, stderr: str) -> RdmaTest:
    """What `ibv_rc_pingpong` says of a device."""
    match = _RATE.search(stdout)
    if match:
        return RdmaTest(name=name, megabits=float(match[1]))
    complaints = [line.strip() for line in stderr.splitlines() if line.strip()]
    return RdmaTest(name=name, megabits=None, failure=(complaints or ["it said nothing"])[-1])


def chosen_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that decide how a run's libraries behave, for a report."""
    prefixes = ("XLA_", "JAX_", "NCCL_", "RCCL_", "HSA_", "HIP_", "ROCR_", "GPU_MAX_HW_QUEUES")
    return {name: environment[name] for name in sorted(environment) if name.startswith(prefixes)}
