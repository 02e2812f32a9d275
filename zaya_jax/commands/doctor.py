"""`zaya doctor`: checks what a node, or all nodes of a job, can be used for, and how to fix what is missing.

It combines the checks of `zaya_jax.aegis` with measurements of `zaya_jax.bench`.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.doctor import host_facts
from zaya_jax.aegis.doctor.doctor import examine, worst_by_name
from zaya_jax.aegis.doctor.facts import Disk, HostFacts, Speed
from zaya_jax.aegis.doctor.findings import BAD, GOOD, STATES, USES, Finding, Verdict, judge
from zaya_jax.aegis.doctor.software_checks import TRAINING_FLAGS
from zaya_jax.aegis.doctor.software_facts import (
    chosen_environment,
    last_json,
    lone_environment,
    probe_jax,
    read_versions,
    run_module,
    try_rdma,
)
from zaya_jax.bench.results import write_json
from zaya_jax.bench.storage import disk
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, check_positive
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.process_group import find_process_group
from zaya_jax.plan.output.picture import check_outputs
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.text_tables import name_column

NOT_FIT = 3
"""Exit code for a use that is not possible, as that of `zaya ckpt verify` for a damaged checkpoint."""
LIMIT_SECONDS = 600.0
DISK_GIB = 2**-4
"""Amount of data for a quick measurement of the disk; `zaya bench storage` measures more thoroughly."""
MAX_NAMES = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya doctor` with its arguments; exits with code 3 if the use in --use is not possible.

    Raises:
      UserError: for invalid options.
    """
    options = _parser().parse_args(argv)
    check_outputs(json_file=options.json)
    if not pathlib.Path(options.folder).is_dir():
        raise UserError(
            f'--folder is "{options.folder}"; it must be a folder on the disk where runs will be stored'
        )
    check_positive(options, "timeout")
    with hosts.joined(find_process_group(os.environ), limit_seconds=options.timeout):
        facts = read(options)
        found = _gather_findings(facts)
        verdicts = judge([each for findings in found.values() for each in findings])
        if hosts.is_first():
            report(found, verdicts)
            write_json(options.json, _values(facts, found, verdicts))
    # After the block, so that all processes have left the group before one of them exits.
    if any(each.use == options.use and each.state == BAD for each in verdicts):
        sys.exit(NOT_FIT)


def _gather_findings(facts: HostFacts) -> dict[str, list[Finding]]:
    """Checks this host, and gathers the findings of all hosts, by host name."""
    # As dicts, because processes exchange JSON values.
    replies = hosts.gather("doctor", [facts.host, [dataclasses.asdict(each) for each in examine(facts)]])
    # If several processes run on a host, their numbers make the names unique.
    return {
        f"{host} ({number})" if hosts.host_names().count(host) > 1 else host: [
            Finding(**each) for each in values
        ]
        for number, (host, values) in enumerate(replies)
    }


def read(options: argparse.Namespace) -> HostFacts:
    """Reads and measures this host."""
    gpus, nics = host_facts.read_gpus(), host_facts.read_nics()
    # The process that probes jax must not join the group of processes that this one belongs to.
    alone = lone_environment(os.environ)
    probe = probe_jax(alone)
    # Measurements on GPUs that jax cannot use would only repeat its error.
    is_sound = bool(gpus) and bool(probe.kinds)
    # All processes take part at about the same time, so that differences of a second are those of clocks.
    times = hosts.gather("clock", time.time())
    return HostFacts(
        host=socket.gethostname(),
        versions=read_versions(),
        probe=probe,
        refused_flags=_refused(alone) if is_sound else None,
        rocm=host_facts.read_rocm_version(),
        gpus=gpus,
        nics=nics,
        # RDMA matters only between nodes with GPUs.
        rdma=try_rdma(nics) if gpus else None,
        clock=host_facts.read_clock(),
        clock_apart_seconds=max(times) - min(times) if len(times) > 1 else None,
        shared_memory=host_facts.read_shared_memory(),
        limits=host_facts.read_limits(),
        ports=host_facts.read_ports(),
        memory_bytes=available_memory(),
        disk=measure_disk(pathlib.Path(options.folder)) if options.disk else None,
        speed=measure_speed(alone, options.timeout) if is_sound and options.speed else None,
        environment=chosen_environment(),
    )


def _refused(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Returns the training flags that XLA does not know. Its CPU backend knows the same flags."""
    return probe_jax(
        {**environment, "XLA_FLAGS": " ".join(TRAINING_FLAGS), "JAX_PLATFORMS": "cpu"}
    ).unknown_flags


def measure_disk(folder: pathlib.Path) -> Disk:
    """Measures the disk of a folder; if it is nearly full, only its free space."""
    # The measurement writes DISK_GIB of data, and must not fill a nearly full disk.
    free, sync_worst, write_bandwidth = shutil.disk_usage(folder).free, 0.0, 0.0
    if free >= 4 * DISK_GIB * 2**30:
        measured = disk.measure(folder, gib=DISK_GIB)
        sync_worst, write_bandwidth = measured.sync_worst, measured.write_bandwidth
    place = str(folder.resolve())
    return Disk(folder=place, free_bytes=free, sync_worst=sync_worst, write_bandwidth=write_bandwidth)


def measure_speed(environment: Mapping[str, str], limit_seconds: float) -> Speed:
    """Measures AMD's acceptance figures for the GPUs of this host, in a process that can be killed."""
    done = run_module("zaya_jax.bench.acceptance", environment, limit_seconds)
    if done is None:
        return Speed(failure=f"a measurement did not end within {limit_seconds:.0f} s: a GPU or a link hangs")
    return read_speed(done.returncode, done.stdout, done.stderr)


def read_speed(code: int, stdout: str, stderr: str) -> Speed:
    """Parses the output of `zaya_jax.bench.acceptance`."""
    if (values := last_json(code, stdout)) is not None:
        return Speed(**values)
    errors = [line.strip() for line in stderr.splitlines() if line.strip()]
    # The last line of a traceback is the error itself.
    return Speed(failure=(errors or [f"the measurement ended with exit code {code}"])[-1])


def report(found: Mapping[str, Sequence[Finding]], verdicts: Sequence[Verdict]) -> None:
    """Prints the findings, the verdicts, and the actions, the worst finding first."""
    console = Console(soft_wrap=True, highlight=False)
    worst = worst_by_name(found)
    table = Table(
        *map(name_column, ("check", "state", "found")), title=f"zaya doctor: {_join_names(list(found))}"
    )
    for finding, on in worst:
        # Names of hosts say nothing if there is one, or if all of them passed.
        where = "" if len(found) == 1 or finding.state == GOOD else f" ({_join_names(on)})"
        table.add_row(finding.name, finding.state, finding.found + where)
    console.print(table)
    for verdict in verdicts:
        console.print(verdict.sentence)
    console.print("\nwhat to do:")
    # The worst come first. The sort is stable, so that equal ones stay in the order of the checks.
    actions = sorted((each for each, _ in worst if each.action), key=lambda each: -STATES.index(each.state))
    for number, finding in enumerate(actions, start=1):
        console.print(f"{number}. {finding.sentence}")
    if not actions:
        console.print("nothing: all checks passed")


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _values(
    facts: HostFacts, found: Mapping[str, Sequence[Finding]], verdicts: Sequence[Verdict]
) -> dict[str, Any]:
    return {
        "verdicts": [dataclasses.asdict(each) | {"sentence": each.sentence} for each in verdicts],
        "findings": {
            host: [dataclasses.asdict(each) for each in findings] for host, findings in found.items()
        },
        "readings": dataclasses.asdict(facts),  # of the first process' host
    }


def _parser() -> Parser:
    parser = Parser(
        "doctor",
        "Check what this machine can be used for, and how to fix what is missing: versions, GPUs, flags, "
        "RCCL, NICs, an RDMA test, ports, disk, clock, limits, and AMD's acceptance figures. "
        "Under srun, with one task per node, it checks all nodes.",
        (
            "zaya doctor",
            "zaya doctor --folder=/shared/runs --json=doctor.json",
            "zaya doctor --use=cluster --no-speed",
        ),
    )
    uses = "; ".join(f"{use}: {what}" for use, what in USES.items())
    parser.add_argument(
        "--use", choices=list(USES), help=f"exit with code {NOT_FIT} if this use is not possible ({uses})"
    )
    parser.add_argument(
        "--folder", default=".", help="folder for runs, whose disk is measured (default: current folder)"
    )
    parser.add_argument("--no-disk", dest="disk", action="store_false", help="do not measure the disk")
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="do not measure the GPUs")
    parser.add_argument(
        "--timeout",
        default=LIMIT_SECONDS,
        metavar="SECONDS",
        help="time limit of each measurement, and of waiting for other hosts",
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write all results, and the measurements that they are based on"
    )
    return parser
