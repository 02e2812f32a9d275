"""Facts about a host's software: versions, jax's devices, flags, and RDMA tests."""

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

from zaya_jax.aegis.doctor.host_facts import Nic

PACKAGES = ("jax", "jaxlib", "jax-rocm7-plugin", "jax-rocm7-pjrt", "rocm-sdk-core", "flax")
PROBE_SECONDS = 120.0
"""Time limit for jax to initialize its devices, which takes tens of seconds on 8 GPUs."""
PINGPONG = "ibv_rc_pingpong"
PINGPONG_SECONDS = 20.0
"""Time limit for the test of one port."""
# The port is the default of the tool.
_PINGPONG_PORT, _PINGPONG_BYTES = 18515, 65_536
_UNKNOWN_FLAG = re.compile(r"--(xla_\w+)")
_RATE = re.compile(r"=\s*([\d.]+)\s*Mbit/sec")
# Matches variables that make a process a member of a run with several processes.
_LONE = re.compile(r"(JAX_(COORDINATOR|NUM_PROCESSES|PROCESS_ID)|SLURM_|JOB_COMPLETION)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe:
    """Result of starting jax in a separate process.

    Attributes:
      platform: jax's name of the platform; "" if jax found no devices.
      kinds: kind of each device.
      rccl: version of RCCL; None if it cannot be loaded.
      unknown_flags: names in XLA_FLAGS that XLA does not know.
      failure: last line of the error output; "" if there was no error.
    """

    platform: str = ""
    kinds: tuple[str, ...] = ()
    rccl: str | None = None
    unknown_flags: tuple[str, ...] = ()
    failure: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RdmaTest:
    """Result of the test of one port: data rate in Mbit/s, or None and the reason of the failure."""

    name: str
    megabits: float | None
    failure: str = ""


def read_versions() -> dict[str, str | None]:
    """Returns the versions of Python and jax's packages; None for packages that are not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            # Not by an import, because a broken plugin may abort the process that loads it.
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions


def lone_environment(environment: Mapping[str, str], **changes: str) -> dict[str, str]:
    """Returns an environment without the variables that make a process a member of a run."""
    return {name: value for name, value in environment.items() if not _LONE.match(name)} | changes


def probe_jax(environment: Mapping[str, str], *, limit_seconds: float = PROBE_SECONDS) -> Probe:
    """Starts jax in a separate process, which unknown flags or a driver may abort.

    Args:
      environment: environment variables of the process.
      limit_seconds: time limit in seconds.
    """
    done = run_module("zaya_jax.aegis.doctor.probe", environment, limit_seconds)
    if done is None:
        return Probe(failure=f"jax found no devices within {limit_seconds:.0f} s")
    return read_probe(done.returncode, done.stdout, done.stderr)


def run_module(
    module: str, environment: Mapping[str, str], limit_seconds: float
) -> subprocess.CompletedProcess[str] | None:
    """Runs a Python module in a separate process; returns None at the time limit."""
    try:
        # An exit code other than 0 is no error here: the caller reads the reason from the output.
        return subprocess.run(
            [sys.executable, "-m", module],
            env=dict(environment),
            capture_output=True,
            text=True,
            timeout=limit_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None


def last_json(code: int, stdout: str) -> dict | None:
    """Returns the last JSON object that a process printed; None if it failed or printed none."""
    # Libraries may print lines of their own before and after it.
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if code == 0 and lines else None


def read_probe(code: int, stdout: str, stderr: str) -> Probe:
    """Parses the output of `zaya_jax.aegis.doctor.probe`."""
    if (values := last_json(code, stdout)) is not None:
        return Probe(platform=values["platform"], kinds=tuple(values["kinds"]), rccl=values["rccl"])
    errors = [line for line in stderr.splitlines() if line.strip()]
    # XLA lists unknown flags in one line, before the stack trace of its abort.
    about_flags = [line for line in errors if "XLA_FLAGS" in line]
    flags = tuple(dict.fromkeys(flag for line in about_flags for flag in _UNKNOWN_FLAG.findall(line)))
    last = (about_flags or errors or [f"jax ended with exit code {code}"])[-1]
    return Probe(unknown_flags=flags, failure=last.strip())


def try_rdma(nics: Sequence[Nic], *, tool: str = PINGPONG) -> tuple[RdmaTest, ...] | None:
    """Tests each active port by sending to itself; returns None if the tool is not installed.

    This tests the NIC and its driver, but no cable; `zaya bench collectives` tests the network between nodes.

    Args:
      nics: RDMA ports of this host.
      tool: `ibv_rc_pingpong` of rdma-core, or a substitute in tests.
    """
    if shutil.which(tool) is None:
        return None
    return tuple(_ping_itself(nic, tool) for nic in nics if nic.state == "ACTIVE")


def _ping_itself(nic: Nic, tool: str) -> RdmaTest:
    flags = {"-d": nic.name, "-i": nic.port, "-s": _PINGPONG_BYTES, "-p": _PINGPONG_PORT}
    # RoCE connects by an address from this table, and InfiniBand without one.
    flags |= {} if nic.gid_index is None else {"-g": nic.gid_index}
    command = [tool, *(str(word) for flag in flags.items() for word in flag)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        time.sleep(0.5)  # the server does not report when it begins to listen
        # The two sides exchange addresses over TCP on this host, and then send their data through the NIC.
        client = subprocess.run(
            [*command, "127.0.0.1"], capture_output=True, text=True, timeout=PINGPONG_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return RdmaTest(name=nic.name, megabits=None, failure=f"no answer within {PINGPONG_SECONDS:.0f} s")
    finally:
        # After a test that passed the server ends by itself.
        with contextlib.suppress(ProcessLookupError):
            server.kill()
        server.wait()
    return read_pingpong(nic.name, client.stdout, client.stderr)


def read_pingpong(name: str, stdout: str, stderr: str) -> RdmaTest:
    """Parses the output of `ibv_rc_pingpong`."""
    match = _RATE.search(stdout)
    if match:
        return RdmaTest(name=name, megabits=float(match[1]))
    errors = [line.strip() for line in stderr.splitlines() if line.strip()]
    return RdmaTest(name=name, megabits=None, failure=(errors or ["no output"])[-1])


def chosen_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns the environment variables that change how a run's libraries behave."""
    prefixes = ("XLA_", "JAX_", "NCCL_", "RCCL_", "HSA_", "HIP_", "ROCR_", "GPU_MAX_HW_QUEUES")
    return {name: environment[name] for name in sorted(environment) if name.startswith(prefixes)}
