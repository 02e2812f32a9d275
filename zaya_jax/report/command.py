"""`zaya report`: runs in one HTML file, side by side."""

import pathlib
from collections.abc import Sequence

from zaya_jax import durable
from zaya_jax.options import Parser
from zaya_jax.report.page import page_of
from zaya_jax.report.run_record import read_run
from zaya_jax.tables import format_bytes

OUTPUT = "report.html"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report of runs.

    Raises:
      ValueError: for a folder that is no run's, or one that is named twice.
    """
    options = _parser().parse_args(argv)
    _check_names(options.runs)
    runs = [read_run(folder) for folder in options.runs]
    page = page_of(runs)
    with durable.naming(options.output):
        durable.write(options.output, page)
    for run in runs:
        for note in run.notes:
            print(note)
    print(f"{options.output}: {format_bytes(len(page.encode()))}")


def _parser() -> Parser:
    parser = Parser(
        "report",
        "Writes one HTML file on one or several runs: curves, load of experts, samples, configs, versions.",
        (
            "zaya report runs/tiny",
            "zaya report runs/tiny --output=tiny.html",
            "zaya report runs/tiny runs/wide runs/deep     # side by side, and in what they differ",
        ),
    )
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="the folder of a run")
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path(OUTPUT),
        metavar="FILE",
        help="to be written (default: %(default)s)",
    )
    return parser


def _check_names(folders: Sequence[pathlib.Path]) -> None:
    for folder in folders:
        if folders.count(folder) > 1:
            raise ValueError(f"{folder} is named {folders.count(folder)} times; each run must be named once")
