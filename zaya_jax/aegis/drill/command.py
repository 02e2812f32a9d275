"""`zaya aegis drill`: runs a drill on this machine, and prints its score."""

import contextlib
import dataclasses
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

from zaya_jax.aegis.drill.drill import KINDS, SAVE_EVERY, Score, plan_faults, score_run
from zaya_jax.aegis.views.goodput import BUCKETS
from zaya_jax.aegis.watch.fault_injection import VARIABLE
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import dump_json
from zaya_jax.options import Parser
from zaya_jax.text_tables import name_column, number_column

RUN, LOG = "run", "drill.log"
STALL_SECONDS = 10.0
"""Time limit of the watchdog: shorter than in real training, because a drill has many hangs."""
NOISE_SECONDS = 3.0
"""Maximum delay of slow steps in a drill without faults; below the limit of the watchdog."""
# Number of planned faults, more than there is time for.
_FAULTS = 1000
_LEAVING_SECONDS = 120.0


@dataclasses.dataclass(frozen=True)
class Drill:
    """Settings of a drill.

    Attributes:
      folder: folder of the drill, which contains that of the run.
      minutes: duration in minutes.
      processes: number of processes of the run, with one device each.
      seed: seed of the faults, or of the slow steps.
      undisturbed: whether there are no faults, but slow steps, a slow disk and busy cores.
    """

    folder: pathlib.Path
    minutes: float
    processes: int
    seed: int
    undisturbed: bool


def main(argv: Sequence[str]) -> None:
    """Runs `zaya aegis drill`; exits with code 3 if a fault was not detected, or there was a false alarm.

    Raises:
      UserError: for invalid numbers, or a folder that is not empty.
    """
    options = _parser().parse_args(argv)
    for name in ("minutes", "processes"):
        if getattr(options, name) <= 0:
            raise UserError(f"--{name} is {getattr(options, name)}; it must be above 0")
    if options.folder.exists() and any(options.folder.iterdir()):
        raise UserError(f"{options.folder} is not empty; a drill needs an empty or new --folder")
    drill = Drill(options.folder, options.minutes, options.processes, options.seed, options.no_faults)
    score = run_drill(drill)
    if options.json:
        print(dump_json(score_json(score), indent=2))
    else:
        # Texts of events may contain brackets, which rich would take for markup.
        Console(soft_wrap=True, highlight=False, markup=False).print(*score_tables(score, drill), sep="\n")
    if score.alarms or not all(each.noticed for each in score.outcomes):
        sys.exit(3)


def _parser() -> Parser:
    parser = Parser(
        "aegis drill",
        "Train a small model under a supervisor, inject faults of every kind, and score their handling.",
        (
            "zaya aegis drill --minutes=40 --processes=4",
            "zaya aegis drill --minutes=40 --no-faults --folder=runs/quiet",
        ),
    )
    parser.add_argument("--minutes", default=40.0, help="duration in minutes")
    parser.add_argument("--processes", default=4, help="number of processes")
    parser.add_argument("--seed", default=0, help="seed of the faults")
    parser.add_argument(
        "--folder",
        type=pathlib.Path,
        default=pathlib.Path("runs/drill"),
        metavar="FOLDER",
        help="new or empty folder of the drill",
    )
    parser.add_argument(
        "--no-faults", action="store_true", help="no faults, but slow steps, a slow disk and busy cores"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run_drill(drill: Drill) -> Score:
    """Runs a drill and scores it."""
    drill.folder.mkdir(parents=True, exist_ok=True)
    faults = [] if drill.undisturbed else plan_faults(drill.seed, count=_FAULTS, processes=drill.processes)
    specs = _slow_steps(drill) if drill.undisturbed else [fault.spec for fault in faults]
    until = time.monotonic() + 60 * drill.minutes
    log = drill.folder / LOG
    with log.open("w") as output:
        process = subprocess.Popen(
            _command(drill), env=os.environ | {VARIABLE: ",".join(specs)}, stdout=output, stderr=output
        )
        with _noise(drill) if drill.undisturbed else contextlib.nullcontext():
            while process.poll() is None and time.monotonic() < until:
                time.sleep(0.5)
        # The supervisor passes the signal on, and the run saves its state.
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_LEAVING_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise UserError(
                f"the run did not end within {_LEAVING_SECONDS:.0f} s of SIGTERM; see {log}"
            ) from None
    # 75: the run saved its state after SIGTERM, at the end of the drill's time.
    if process.returncode not in (0, 75):
        print(f"the supervisor failed with code {process.returncode}; see {log}", file=sys.stderr)
    return score_run(drill.folder / RUN, faults)


def _command(drill: Drill) -> list[str]:
    fields = {
        "run_folder": drill.folder / RUN,
        # Never reached: a drill ends by its time.
        "train.num_steps": 10_000_000,
        "train.checkpoint_every": SAVE_EVERY,
        # Never, as evaluations only take time from recoveries.
        "train.eval_every": 10_000_000,
        "train.log_every": 1,
        # After a damaged checkpoint the run resumes from an earlier one.
        "train.keep_checkpoints": 4,
        "train.sample_tokens": 0,
        # Small, because every process compiles it at each restart: on CPUs jax caches only process 0's
        # programs.
        "model.num_hidden_layers": 1,
        "model.hidden_size": 32,
        "model.router": "linear",
        "data.batch_size": 2 * drill.processes,
        "data.sequence_length": 64,
        "watch.min_seconds": STALL_SECONDS,
        # Sensitive limits, so that spikes are detected within a few steps.
        "watch.spike_steps": 4,
        "watch.spike_deviations": 5.0,
        # Each planned spike of the loss leads to a rollback.
        "watch.max_rollbacks": 1000,
        "watch.replica_check_every": 5,
        # In such a small model experts get no tokens for a while, without any fault.
        "watch.expert_alert_lines": 1000,
    }
    overrides = [f"--config.{name}={value}" for name, value in fields.items()]
    supervise = ["supervise", f"--processes={drill.processes}", "--devices=1"]
    return [sys.executable, "-m", "zaya_jax.cli", *supervise, "--", "train", *overrides]


def _slow_steps(drill: Drill) -> list[str]:
    """Returns specifications of occasional slow steps, which are not stalls."""
    generator, step, specs = random.Random(drill.seed), 30, []
    while len(specs) < _FAULTS:
        step += generator.randint(20, 200)
        seconds = generator.uniform(0.5, NOISE_SECONDS)
        specs.append(f"hang@step={step}:process={generator.randrange(drill.processes)}:seconds={seconds:.2f}")
    return specs


@contextlib.contextmanager
def _noise(drill: Drill) -> Iterator[None]:
    """Loads the disk and the cores from time to time, as other users of a machine would."""
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
        # The threads remove their file and end their processes before they return.
        for thread in threads:
            thread.join()


def _use_disk(drill: Drill, ended: threading.Event) -> None:
    file = drill.folder / "noise"
    while not ended.wait(random.uniform(2, 20)):
        # fsync, so that checkpoints compete with it for the disk.
        command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", "count=256", "conv=fsync", "status=none"]
        subprocess.run(command, check=False)
    file.unlink(missing_ok=True)


def _use_cores(drill: Drill, ended: threading.Event) -> None:
    del drill
    while not ended.wait(random.uniform(2, 30)):
        command = [sys.executable, "-c", "while True: pass"]
        # Processes and not threads, which would share one core under Python's lock.
        busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
        # Not a sleep, so that the end of the drill ends the load at once.
        ended.wait(random.uniform(2, 15))
        for each in busy:
            each.kill()
            each.wait()


def score_tables(score: Score, drill: Drill) -> list[Any]:
    """Returns a score as tables and text."""
    blocks: list[Any] = [_kinds_table(score)] if score.outcomes else []
    if parts := score.parts():
        table = Table(name_column("phase of a recovery"), number_column("median seconds"))
        for name, seconds in parts.items():
            table.add_row(name, f"{seconds:.1f}")
        totals = [each.total for each in score.recoveries()]
        table.add_row("total", f"{statistics.median(totals):.1f}, maximum {max(totals):.1f}")
        blocks.append(table)
    if drill.undisturbed:
        alarms = "\n  ".join(score.alarms)
        blocks.append(f"false alarms: {len(score.alarms)}" + (f"\n  {alarms}" if alarms else ""))
    goodput = score.goodput
    buckets = ", ".join(f"{name} {goodput.seconds[name]:.0f}" for name in BUCKETS)
    blocks.append(f"goodput {goodput.share:.1%} of {goodput.total:,.0f} s: {buckets} (seconds)")
    return blocks


def _kinds_table(score: Score) -> Table:
    noticed = sum(each.noticed for each in score.outcomes)
    title = f"{noticed} of {len(score.outcomes)} faults were detected"
    columns = (number_column(name) for name in ("occurred", "detected", "median s", "maximum s"))
    table = Table(name_column("fault"), *columns, title=title)
    for kind in KINDS:
        of_kind = [each for each in score.outcomes if each.kind == kind]
        totals = [each.total for each in of_kind if each.seconds]
        times = (f"{statistics.median(totals):.1f}", f"{max(totals):.1f}") if totals else ("", "")
        table.add_row(kind, str(len(of_kind)), str(sum(each.noticed for each in of_kind)), *times)
    return table


def score_json(score: Score) -> dict[str, Any]:
    """Returns a score as JSON values."""
    return {
        "outcomes": [dataclasses.asdict(each) | {"total_seconds": each.total} for each in score.outcomes],
        "alarms": list(score.alarms),
        "median_seconds_of_parts": score.parts(),
        "goodput": score.goodput.share,
        "seconds": dict(score.goodput.seconds),
    }
