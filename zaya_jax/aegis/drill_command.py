"""`zaya aegis drill`: a campaign of faults on this machine, and its score."""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from zaya_jax.aegis.drill import KINDS, SAVE_EVERY, Outcome, Score, order_faults, score
from zaya_jax.aegis.faults import VARIABLE
from zaya_jax.aegis.goodput import BUCKETS
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column

RUN, LOG = "run", "drill.log"
STALL_SECONDS = 10.0
"""That the run may stand still: shorter than any that one would train with, for a drill has many hangs."""
NOISE_SECONDS = 3.0
"""That a step, or what a disk is asked for, is slow in an undisturbed drill; below the above."""
_FAULTS = 1000
"""Ordered: more than there is time for."""
_LEAVING_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Drill:
    """What is to be run.

    Attributes:
      folder: of the drill, in which the run's folder lies.
      minutes: that it takes.
      processes: of the run, with a device each.
      seed: of the faults, or of the noise.
      undisturbed: whether there are no faults, but noise.
    """

    folder: pathlib.Path
    minutes: float
    processes: int
    seed: int
    undisturbed: bool


def main(argv: Sequence[str]) -> None:
    """Runs `zaya aegis drill` with the words behind it; code 3 if a fault was missed, or there was an alarm.

    Raises:
      ValueError: for numbers that cannot be, or a folder that holds something.
    """
    options = _parser().parse_args(argv)
    for name in ("minutes", "processes"):
        if getattr(options, name) <= 0:
            raise ValueError(f"--{name} is {getattr(options, name)}; it must be above 0")
    if options.folder.exists() and any(options.folder.iterdir()):
        raise ValueError(f"{options.folder} is not empty; a drill begins in a folder of its own")
    drill = Drill(options.folder, options.minutes, options.processes, options.seed, options.undisturbed)
    found = run_drill(drill)
    if options.json:
        print(json.dumps(values_of(found), indent=2))
    else:
        Console(soft_wrap=True, highlight=False, markup=False).print(*tables_of(found, drill), sep="\n")
    if found.alarms or not all(each.noticed for each in found.outcomes):
        sys.exit(3)


def _parser() -> Parser:
    parser = Parser(
        "aegis drill",
        "Trains a small run under a supervisor, orders faults of every kind, and says what became of each.",
        (
            "zaya aegis drill --minutes=40 --processes=4",
            "zaya aegis drill --minutes=40 --undisturbed --folder=runs/quiet",
        ),
    )
    parser.add_argument("--minutes", type=float, default=40.0, help="that it takes (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=4, help="of the run (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    parser.add_argument("--folder", type=pathlib.Path, default=pathlib.Path("runs/drill"), metavar="FOLDER")
    parser.add_argument(
        "--undisturbed", action="store_true", help="no faults, but slow steps, a slow disk and busy cores"
    )
    parser.add_argument("--json", action="store_true", help="as JSON, for programs")
    return parser


def run_drill(drill: Drill) -> Score:
    """Runs a drill to its end, and scores it."""
    drill.folder.mkdir(parents=True, exist_ok=True)
    orders = [] if drill.undisturbed else order_faults(drill.seed, count=_FAULTS, processes=drill.processes)
    words = _slow_steps(drill) if drill.undisturbed else [order.words for order in orders]
    until = time.monotonic() + 60 * drill.minutes
    log = drill.folder / LOG
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(drill), env=os.environ | {VARIABLE: ",".join(words)}, stdout=output, stderr=output
        )
        with _noise(drill) if drill.undisturbed else contextlib.nullcontext():
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise ValueError(f"the run did not end within {_LEAVING_SECONDS:.0f} s; see {log}") from None
    if process.returncode not in (0, 75):
        sentence = f"the supervisor ended with code {process.returncode} before its time; see {log}"
        print(sentence, file=sys.stderr)
    return score(drill.folder / RUN, orders)


def _command(drill: Drill) -> list[str]:
    fields = {
        "run_folder": drill.folder / RUN,
        "train.num_steps": 10_000_000,
        "train.checkpoint_every": SAVE_EVERY,
        "train.eval_every": 10_000_000,
        "train.log_every": 1,
        "train.keep_checkpoints": 4,
        "train.sample_tokens": 0,
        # Small, for each process compiles it at each begin: on CPUs jax keeps the first one's programs alone.
        "model.num_hidden_layers": 1,
        "model.hidden_size": 32,
        "model.router": "linear",
        "data.batch_size": 2 * drill.processes,
        "data.sequence_length": 64,
        "watch.least_seconds": STALL_SECONDS,
        "watch.spike_steps": 4,
        "watch.spike_deviations": 5.0,
        "watch.most_spikes": 1000,
        "watch.compare_every": 5,
        # So small a network starves experts for a while, which is no fault of anybody's.
        "watch.starved_lines": 1000,
    }
    words = [f"--config.{name}={value}" for name, value in fields.items()]
    supervise = ["supervise", f"--processes={drill.processes}", "--devices=1"]
    return [sys.executable, "-m", "zaya_jax.cli", *supervise, "--", "train", *words]


def _slow_steps(drill: Drill) -> list[str]:
    """A slow step of one process now and then, which is no stall."""
    drawn, step, words = random.Random(drill.seed), 30, []
    while len(words) < _FAULTS:
        step += drawn.randint(20, 200)
        seconds = drawn.uniform(0.5, NOISE_SECONDS)
        words.append(f"hang@step={step}:process={drawn.randrange(drill.processes)}:seconds={seconds:.2f}")
    return words


@contextlib.contextmanager
def _noise(drill: Drill) -> Iterator[None]:
    """A disk and cores that others use too, now and then."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=work, args=(drill, ended), daemon=True) for work in (_use_disk, _use_cores)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _use_disk(drill: Drill, ended: threading.Event) -> None:
    file = drill.folder / "noise"
    while not ended.wait(random.uniform(2, 20)):
        # Until it is on the disk, where checkpoints wait for it.
        words = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", "count=256", "conv=fsync", "status=none"]
        subprocess.run(words, check=False)
    file.unlink(missing_ok=True)


def _use_cores(drill: Drill, ended: threading.Event) -> None:
    del drill
    while not ended.wait(random.uniform(2, 30)):
        words = [sys.executable, "-c", "while True: pass"]
        busy = [subprocess.Popen(words) for _ in range(os.cpu_count() or 1)]
        ended.wait(random.uniform(2, 15))
        for each in busy:
            each.kill()
            each.wait()


def tables_of(found: Score, drill: Drill) -> list[Any]:
    """What a person wants to see of a score."""
    shown: list[Any] = [_kinds_table(found)] if found.outcomes else []
    if parts := found.parts():
        table = Table(name_column("of a recovery"), number_column("median seconds"))
        for name, seconds in parts.items():
            table.add_row(name, f"{seconds:.1f}")
        totals = [each.total for each in found.recoveries()]
        table.add_row("all of it", f"{statistics.median(totals):.1f}, at worst {max(totals):.1f}")
        shown.append(table)
    if drill.undisturbed:
        alarms = "\n  ".join(found.alarms)
        shown.append(f"false alarms: {len(found.alarms)}" + (f"\n  {alarms}" if alarms else ""))
    goodput = found.goodput
    buckets = ", ".join(f"{name} {goodput.seconds[name]:.0f}" for name in BUCKETS)
    shown.append(f"goodput {goodput.share:.1%} of {goodput.total:,.0f} s: {buckets} (seconds)")
    return shown


def _kinds_table(found: Score) -> Table:
    noticed = sum(each.noticed for each in found.outcomes)
    title = f"{noticed} of {len(found.outcomes)} faults were noticed"
    columns = (number_column(name) for name in ("struck", "noticed", "median s", "worst s"))
    table = Table(name_column("fault"), *columns, title=title)
    for kind in KINDS:
        of_kind = [each for each in found.outcomes if each.kind == kind]
        totals = [each.total for each in of_kind if each.seconds]
        times = (f"{statistics.median(totals):.1f}", f"{max(totals):.1f}") if totals else ("", "")
        table.add_row(kind, str(len(of_kind)), str(sum(each.noticed for each in of_kind)), *times)
    return table


def values_of(found: Score) -> dict[str, Any]:
    """The same as plain values, for programs."""
    return {
        "outcomes": [_plain(each) for each in found.outcomes],
        "alarms": list(found.alarms),
        "median_seconds_of_parts": found.parts(),
        "goodput": found.goodput.share,
        "seconds": dict(found.goodput.seconds),
    }


def _plain(outcome: Outcome) -> dict[str, Any]:
    return {
        "kind": outcome.kind,
        "step": outcome.step,
        "noticed": outcome.noticed,
        "seconds": dict(outcome.seconds),
        "total_seconds": outcome.total,
    }
