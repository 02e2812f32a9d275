"""`zaya doctor`: what a node, or all nodes of a job, can be used for, and what to do about what is missing.

It stands beside `cli.py`: it judges by `zaya_jax.aegis`, and measures by `zaya_jax.bench`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax import durable
from zaya_jax.aegis import host_readings
from zaya_jax.aegis.doctor import examine, worst_by_name
from zaya_jax.aegis.findings import BAD, GOOD, STATES, USES, Finding, Verdict, judge
from zaya_jax.aegis.readings import Disk, Readings, Speed
from zaya_jax.aegis.software_checks import TRAINING_FLAGS
from zaya_jax.aegis.software_readings import (
    chosen_environment,
    lone_environment,
    probe_jax,
    read_versions,
    try_rdma,
)
from zaya_jax.bench import storage
from zaya_jax.bench.machine import check_outputs
from zaya_jax.options import Parser
from zaya_jax.parallel import hosts
from zaya_jax.parallel.process_group import find_process_group
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.tables import name_column

NOT_FIT = 3
"""As `zaya ckpt verify` ends where the answer is no."""
LIMIT_SECONDS = 600.0
DISK_GIB = 2**-4
"""Written for a quick look at the disk; `zaya bench storage` takes longer, and says more."""
MOST_NAMES = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya doctor` with the words behind it; leaves with code 3 if a named use is not possible.

    Raises:
      ValueError: for options that cannot be.
    """
    options = _parser().parse_args(argv)
    check_outputs(json_file=options.json)
    if not pathlib.Path(options.folder).is_dir():
        raise ValueError(
            f'--folder is "{options.folder}"; it must be a folder on the disk that runs are to have'
        )
    if not options.limit > 0:
        raise ValueError(f"--limit is {options.limit}; it must be above 0")
    with hosts.joined(find_process_group(os.environ), limit_seconds=options.limit):
        readings = read(options)
        # By process: of two on one host both are heard.
        found = {
            f"{host} ({number})" if hosts.names().count(host) > 1 else host: [
                Finding(**each) for each in said
            ]
            for number, (host, said) in enumerate(
                hosts.gather("doctor", [readings.host, [_plain(each) for each in examine(readings)]])
            )
        }
        verdicts = judge([each for findings in found.values() for each in findings])
        if hosts.is_first():
            report(found, verdicts)
            _write(options.json, readings, found, verdicts)
    if any(each.use == options.use and each.state == BAD for each in verdicts):
        sys.exit(NOT_FIT)


def read(options: argparse.Namespace) -> Readings:
    """All that is read and measured of this host."""
    gpus, nics = host_readings.read_gpus(), host_readings.read_nics()
    alone = lone_environment(os.environ)
    probe = probe_jax(alone)
    is_sound = bool(gpus) and bool(probe.kinds)
    times = hosts.gather("clock", time.time())
    return Readings(
        host=socket.gethostname(),
        versions=read_versions(),
        probe=probe,
        refused_flags=_refused(alone) if is_sound else None,
        rocm=host_readings.read_rocm_version(),
        gpus=gpus,
        nics=nics,
        rdma=try_rdma(nics) if gpus else None,
        clock=host_readings.read_clock(),
        clock_apart_seconds=max(times) - min(times) if len(times) > 1 else None,
        shared_memory=host_readings.read_shared_memory(),
        limits=host_readings.read_limits(),
        ports=host_readings.read_ports(),
        memory_bytes=available_memory(),
        disk=measure_disk(pathlib.Path(options.folder)) if options.disk else None,
        speed=measure_speed(alone, options.limit) if is_sound and options.speed else None,
        environment=chosen_environment(),
    )


def _refused(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Which of the flags for training XLA refuses; on CPUs it knows the same."""
    return probe_jax(
        {**environment, "XLA_FLAGS": " ".join(TRAINING_FLAGS), "JAX_PLATFORMS": "cpu"}
    ).unknown_flags


def measure_disk(folder: pathlib.Path) -> Disk:
    """A quick look at a folder's disk; of one that is nearly full only the room."""
    free = shutil.disk_usage(folder).free
    if free < 4 * DISK_GIB * 2**30:
        return Disk(folder=str(folder.resolve()), free_bytes=free, sync_worst=0.0, write_bandwidth=0.0)
    found = storage.measure(folder, gib=DISK_GIB)
    return Disk(
        folder=found.folder,
        free_bytes=free,
        sync_worst=found.sync_worst,
        write_bandwidth=found.write_bandwidth,
    )


def measure_speed(environment: Mapping[str, str], limit_seconds: float) -> Speed:
    """AMD's acceptance figures of the GPUs here, by a process that can be ended."""
    command = [sys.executable, "-m", "zaya_jax.bench.acceptance"]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=limit_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return Speed(failure=f"a measurement did not end within {limit_seconds:.0f} s: a GPU or a link hangs")
    return read_speed(done.returncode, done.stdout, done.stderr)


def read_speed(code: int, stdout: str, stderr: str) -> Speed:
    """What the output of `zaya_jax.bench.acceptance` says."""
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    if code == 0 and lines:
        return Speed(**json.loads(lines[-1]))
    complaints = [line.strip() for line in stderr.splitlines() if line.strip()]
    return Speed(failure=(complaints or [f"the measurement ended with exit code {code}"])[-1])


def report(found: Mapping[str, Sequence[Finding]], verdicts: Sequence[Verdict]) -> None:
    """Prints what was found, what it is good for, and what to do, the worst first."""
    console = Console(soft_wrap=True, highlight=False)
    worst = worst_by_name(found)
    table = Table(*map(name_column, ("what", "state", "found")), title=f"zaya doctor: {_some(list(found))}")
    for finding, on in worst:
        where = "" if len(found) == 1 or finding.state == GOOD else f" ({_some(on)})"
        table.add_row(finding.name, finding.state, finding.found + where)
    console.print(table)
    for verdict in verdicts:
        console.print(verdict.sentence)
    console.print("\nwhat to do:")
    actions = sorted((each for each, _ in worst if each.action), key=lambda each: -STATES.index(each.state))
    for number, finding in enumerate(actions, start=1):
        console.print(f"{number}. {finding.sentence}")
    if not actions:
        console.print("nothing: all is as it should be")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def _plain(finding: Finding) -> dict[str, object]:
    return dataclasses.asdict(finding)


def _write(
    file: str | None,
    readings: Readings,
    found: Mapping[str, Sequence[Finding]],
    verdicts: Sequence[Verdict],
) -> None:
    if file is None:
        return
    values = {
        "verdicts": [dataclasses.asdict(each) | {"sentence": each.sentence} for each in verdicts],
        "findings": {host: [_plain(each) for each in findings] for host, findings in found.items()},
        "readings": dataclasses.asdict(readings),  # of the first process' host
    }
    durable.write(pathlib.Path(file), json.dumps(values, indent=2) + "\n")


def _parser() -> Parser:
    parser = Parser(
        "doctor",
        "Says what this machine can be used for, and what to do about what is missing: versions, GPUs, "
        "flags, RCCL, NICs, RDMA by a test, ports, disk, clock, limits, and AMD's acceptance figures. "
        "Under srun, one task a node, it looks at all nodes.",
        (
            "zaya doctor",
            "zaya doctor --folder=/shared/runs --json=doctor.json",
            "zaya doctor --use=cluster --no-speed",
        ),
    )
    uses = "; ".join(f"{use}: {what}" for use, what in USES.items())
    parser.add_argument(
        "--use", choices=list(USES), help=f"ends with code {NOT_FIT} if that is not possible ({uses})"
    )
    parser.add_argument(
        "--folder", default=".", help="where runs are to be: its disk is measured (default: here)"
    )
    parser.add_argument("--no-disk", dest="disk", action="store_false", help="do not measure the disk")
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="do not measure the GPUs")
    parser.add_argument(
        "--limit",
        type=float,
        default=LIMIT_SECONDS,
        metavar="SECONDS",
        help="of each measurement, and of waiting for other hosts (default: %(default)s)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all that was found, and what it was found from")
    return parser
