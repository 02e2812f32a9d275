"""`zaya bench start`: time from `zaya train` to its first step, in a new folder and at the second start.

Each start is a process with the default config. The first one has an empty folder and no compiled programs,
and the second one resumes after the first was stopped. With `--base`, another checkout of zaya_jax takes
turns with this one, so that other work on the machine affects both.
"""

import dataclasses
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from rich.console import Console

from zaya_jax.errors import UserError
from zaya_jax.options import Parser, check_at_least
from zaya_jax.text_tables import dense_table, name_column

SECTIONS = {"trained ": "tokenizer", "skipped, ": "corpus", "run ": "compiled", "step ": "first step"}
"""Beginning of a line of `zaya train`, and the section that ends with it."""
COLD, SECOND = "first", "second"
ROUNDS = 5
COMMAND = ("-m", "zaya_jax.cli", "train", "--config.train.sample_tokens=0")
CPU = "CPU"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench start` with the given command-line arguments.

    Raises:
      UserError: if the base is no checkout, or a start fails.
    """
    parser = Parser(
        "bench start",
        "Measure the seconds from zaya train to the end of each section of its start, up to the first step, "
        "in an empty folder and at the second start, which resumes. CPU is the CPU time of the process.",
        ("zaya bench start", "zaya bench start --rounds=7 --base=../zaya_jax-before"),
    )
    parser.add_argument("--rounds", default=ROUNDS, help="number of starts of each kind")
    parser.add_argument("--base", metavar="FOLDER", help="another checkout of zaya_jax to compare with")
    options = parser.parse_args(argv)
    check_at_least(options, rounds=1)
    report(measure(_checkouts(options.base), options.rounds))


@dataclasses.dataclass(frozen=True)
class Starts:
    """Measured starts of a checkout, one per round.

    Attributes:
      checkout: name of the checkout.
      kind: `COLD` or `SECOND`.
      seconds: seconds until the end of each section, and the CPU seconds of the process, by name.
    """

    checkout: str
    kind: str
    seconds: list[Mapping[str, float]]

    def median(self, name: str) -> float | None:
        """Returns the median of a section's end; None if a start had no such section."""
        values = [each[name] for each in self.seconds if name in each]
        return statistics.median(values) if values else None


def measure(checkouts: Mapping[str, pathlib.Path], rounds: int) -> list[Starts]:
    """Measures both starts of each checkout in turns.

    Args:
      checkouts: folders that contain the package `zaya_jax`, by name.
      rounds: number of starts of each kind.

    Raises:
      UserError: if a start fails.
    """
    starts = [Starts(name, kind, []) for name in checkouts for kind in (COLD, SECOND)]
    for folder in checkouts.values():
        # Python compiles the files of a new checkout once.
        command, environment = [sys.executable, *COMMAND, "--help"], _environment(folder, folder)
        subprocess.run(command, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    # The rounds are the outer loop, so that a change of the machine's load affects all checkouts.
    for _ in range(rounds):
        for name, checkout in checkouts.items():
            with tempfile.TemporaryDirectory(prefix="zaya-start-") as folder:
                for each in starts:
                    # Both kinds in one folder: the second start finds what the first one left there.
                    if each.checkout == name:
                        each.seconds.append(_start(checkout, pathlib.Path(folder)))
    return starts


def _checkouts(base: str | None) -> dict[str, pathlib.Path]:
    # The folder that contains the package, whichever checkout or environment this is.
    here = pathlib.Path(__file__).resolve().parents[3]
    if base is None:
        return {"this": here}
    folder = pathlib.Path(base).resolve()
    if not (folder / "zaya_jax" / "cli.py").is_file():
        raise UserError(f"--base is {base}, which has no zaya_jax/cli.py; it must be a checkout of zaya_jax")
    return {"base": folder, "this": here}


def _environment(checkout: pathlib.Path, folder: pathlib.Path) -> dict[str, str]:
    # The cache of compiled programs is in the user's cache folder, and is as new as the run. Without
    # PYTHONDONTWRITEBYTECODE, which would compile Python's files at each start.
    caches = ("JAX_COMPILATION_CACHE_DIR", "ZAYA_PROGRAM_CACHE", "PYTHONDONTWRITEBYTECODE")
    kept = {name: value for name, value in os.environ.items() if name not in caches}
    return kept | {"PYTHONPATH": str(checkout), "PYTHONUNBUFFERED": "1", "XDG_CACHE_HOME": f"{folder}/cache"}


def _start(checkout: pathlib.Path, folder: pathlib.Path) -> dict[str, float]:
    """Starts a run, stops it after the first step that it prints, and returns its times."""
    begun, ends, lines = time.monotonic(), {}, []
    process = subprocess.Popen(
        [sys.executable, *COMMAND],
        cwd=folder,
        env=_environment(checkout, folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            lines.append(line)
            name = next((name for prefix, name in SECTIONS.items() if line.startswith(prefix)), None)
            if name is not None and name not in ends:
                ends[name] = time.monotonic() - begun
                # Saves the step and exits, as a scheduler's signal does.
                if name == "first step":
                    process.send_signal(signal.SIGTERM)
    # Unlike RUSAGE_CHILDREN, the usage of this process alone.
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0  # already waited for
    if "first step" not in ends:
        raise UserError(f"zaya train of {checkout} ended before its first step:\n{''.join(lines)}")
    return ends | {CPU: usage.ru_utime + usage.ru_stime}


def report(starts: Sequence[Starts]) -> None:
    """Prints the medians of each kind of start, and their ratios to those of the base."""
    columns = [*SECTIONS.values(), CPU]
    table = dense_table(name_column("start"), *columns, title="seconds until the end of a section, medians")
    for each in starts:
        cells = [each.median(name) for name in columns]
        table.add_row(f"{each.kind}, {each.checkout}", *("" if x is None else f"{x:.2f}" for x in cells))
    Console().print(table)
    for kind in (COLD, SECOND):
        ratios = paired_ratios(starts, kind, "first step")
        if ratios:
            text = ", ".join(f"{ratio:.2f}" for ratio in ratios)
            print(f"{kind} start: {statistics.median(ratios):.2f} of the base's time (rounds: {text})")


def paired_ratios(starts: Sequence[Starts], kind: str, name: str) -> list[float]:
    """Returns this checkout's time divided by the base's, per round; empty without a base."""
    base, this = ([s for s in starts if (s.checkout, s.kind) == (which, kind)] for which in ("base", "this"))
    if not base or not this:
        return []
    return [ours[name] / theirs[name] for ours, theirs in zip(this[0].seconds, base[0].seconds, strict=True)]
