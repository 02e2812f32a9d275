"""`zaya bench control`: how start, stop and commit of a run depend on the number of its processes.

Processes with one CPU device each start, compare their configs, commit a checkpoint without data, and stop,
as those of a run. They share the cores of this machine, which bounds their number. Larger numbers are
simulated.
"""

import dataclasses
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax.bench.control.costs import measure_costs, measure_phases
from zaya_jax.bench.control.phases import PHASES, SERVICE, WRITERS, PhaseCost
from zaya_jax.bench.control.simulation import Costs, Simulation
from zaya_jax.bench.results import this_machine, write_json
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, check_at_least
from zaya_jax.parallel.processes.tree.shape import FAN_OUT
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.text_tables import dense_table

PROCESSES, SIMULATED = (4, 16, 64), (1024, 8192)
ROUNDS = 3
_EXPLANATION = (
    "service, devices: until jax has connected the processes, and has the devices of all; merge: of the "
    "indexes of a checkpoint"
)
PROCESS_BYTES = 20 * 2**20
"""Upper bound of the memory of a light process that it does not share with the others."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Costs of the phases for one number of processes.

    Attributes:
      processes: number of processes.
      is_simulated: whether they were simulated.
      cores: number of cores that they share; None if each has its own.
      phases: costs by name of the phase.
    """

    processes: int
    is_simulated: bool
    cores: int | None
    phases: Mapping[str, PhaseCost]


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench control` with the given command-line arguments.

    Raises:
      UserError: if an option is invalid, memory is insufficient, or a process fails.
    """
    options = _parser().parse_args(argv)
    check_at_least(options, rounds=1, fan_out=2, writers=2)
    for name in ("processes", "simulate"):
        if any(count < 2 for count in getattr(options, name)):
            raise UserError(f"--{name} is {getattr(options, name)}; each number must be 2 or above")
    # Before minutes of measurements.
    check_memory(max(options.processes))
    console = Console(soft_wrap=True, highlight=False)
    with tempfile.TemporaryDirectory(prefix="bench-control-", dir=options.folder) as inside:
        folder, latency = pathlib.Path(inside), options.latency_us
        with console.status("measuring messages"):
            costs = measure_costs(
                folder, rounds=options.rounds, latency=None if latency is None else latency / 1e6
            )
        rows, writers = [], options.writers
        for count in options.processes:
            with console.status(f"measuring {count} processes"):
                phases = measure_phases(count, folder, rounds=options.rounds, writers=writers)
            rows.append(Row(count, False, os.cpu_count(), phases))
            # On as many cores, to be compared.
            rows.append(simulate(count, costs, cores=os.cpu_count(), fan_out=FAN_OUT, writers=writers))
    # On a cluster processes do not share their cores.
    for count in options.simulate:
        with console.status(f"simulating {count} processes"):
            rows.append(simulate(count, costs, cores=None, fan_out=options.fan_out, writers=writers))
    write_json(options.json, to_json(costs, rows))
    for table in tables(rows):
        console.print(table)
    console.print(f"{_EXPLANATION}\n\n{describe_costs(costs)}")


def simulate(count: int, costs: Costs, *, cores: int | None, fan_out: int, writers: int) -> Row:
    """Simulates all phases of a number of processes."""
    simulation = Simulation(count, costs, cores=cores, fan_out=fan_out, writers=writers)
    return Row(count, True, cores, simulation.run())


def check_memory(processes: int) -> None:
    """Checks that the processes fit the memory, where Linux would otherwise kill one.

    Raises:
      UserError: if they do not.
    """
    if processes * PROCESS_BYTES > available_memory():
        raise UserError(
            f"--processes is {processes}, which needs {processes * PROCESS_BYTES / 2**30:.1f} GiB of memory; "
            f"{available_memory() / 2**30:.1f} GiB are free"
        )


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns a table of times, and one of the work of process 0."""
    times = dense_table("processes", *PHASES, title="milliseconds until the last process is done")
    for row in rows:
        where = "their own cores" if row.cores is None else f"{row.cores} cores"
        name = f"{row.processes:,} {'simulated' if row.is_simulated else 'measured'}, {where}"
        times.add_row(name, *(f"{1e3 * row.phases[phase].seconds:,.1f}" for phase in PHASES))
    title = "messages of process 0, and milliseconds of its CPU time and of the service's process"
    work = dense_table("processes", *PHASES, "of service", title=title)
    for row in rows:
        # Simulations on as many cores as measured have the same messages.
        if row.is_simulated and row.cores is not None:
            continue
        name = f"{row.processes:,}{' simulated' if row.is_simulated else ''}"
        costs = (row.phases[phase] for phase in PHASES)
        work.add_row(
            name,
            *(
                f"{each.messages:,}, " * bool(each.messages) + f"{1e3 * each.cpu_seconds:,.1f}"
                for each in costs
            ),
            f"{1e3 * row.phases[SERVICE].service_cpu_seconds:,.0f}",
        )
    return [times, work]


def describe_costs(costs: Costs) -> str:
    """Returns the measured costs as a sentence."""
    micro = {name: 1e6 * value for name, value in dataclasses.asdict(costs).items()}
    return (
        f"A message costs {micro['message']:.0f} us of CPU time at each end and "
        f"{1e3 * micro['per_byte']:.1f} ns per byte, and takes {micro['latency']:.0f} us more. Process 0 "
        f"registers a child in {micro['register']:.0f} us and collects the devices of a process in "
        f"{micro['describe']:.0f} us, jax's service connects a process in {micro['serve']:.0f} us, the "
        f"indexes of a process are merged in {micro['merge']:.0f} us, and a file in a manifest takes "
        f"{micro['file']:.1f} us"
    )


def to_json(costs: Costs, rows: Sequence[Row]) -> dict[str, object]:
    """Returns everything that was measured and simulated, in seconds."""
    return {
        "machine": dataclasses.asdict(this_machine()),
        "costs": dataclasses.asdict(costs),
        "rows": [
            dataclasses.asdict(dataclasses.replace(row, phases={}))
            | {"phases": {name: dataclasses.asdict(each) for name, each in row.phases.items()}}
            for row in rows
        ],
    }


def _parser() -> Parser:
    parser = Parser(
        "bench control",
        "Time the start of a run, the comparison of its configs, the commit of a checkpoint, the merge of "
        "its indexes and the agreement on a stop by the number of processes: with light processes on this "
        "machine, and in a simulation that runs the same protocol with the measured costs. Counts the "
        "messages of process 0 and its CPU time, and the CPU time of the process of jax's service.",
        (
            "zaya bench control",
            "zaya bench control --processes 64 256 --simulate 1024 8192 --latency-us=30 --json=control.json",
        ),
    )
    parser.add_argument(
        "--processes", nargs="+", type=int, default=PROCESSES, help="numbers of processes to measure"
    )
    parser.add_argument(
        "--simulate", nargs="+", type=int, default=SIMULATED, help="numbers of processes to simulate"
    )
    parser.add_argument("--fan-out", default=FAN_OUT, help="children of a process in the simulated tree")
    parser.add_argument(
        "--writers",
        default=WRITERS,
        help="about how many processes write a checkpoint, of more, as train.checkpoint_writers",
    )
    parser.add_argument("--rounds", default=ROUNDS, help="visits to each phase, of which the median counts")
    parser.add_argument(
        "--latency-us",
        type=float,
        metavar="MICROSECONDS",
        help="time between two processes in the simulation (default: as measured on this machine)",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--folder", default=".", help="folder on the disk of checkpoints (default: the current folder)"
    )
    return parser
