"""`zaya report`: one or several runs in one HTML file."""

import pathlib
from collections.abc import Sequence

from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.options import Parser
from zaya_jax.report.page import page_of
from zaya_jax.report.run_record import read_run
from zaya_jax.text_tables import format_bytes

OUTPUT = "report.html"


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the report of runs.

    Raises:
      UserError: if a folder is not a run folder, or is named twice.
    """
    options = _parser().parse_args(argv)
    _check_names(options.runs)
    runs = [read_run(folder) for folder in options.runs]
    page = page_of(runs)
    with durable.path_in_errors(options.output):
        durable.write(options.output, page)
    for run in runs:
        for note in run.notes:
            print(note)
    print(f"{options.output}: {format_bytes(len(page.encode()))}")


def _parser() -> Parser:
    parser = Parser(
        "report",
        "Write one HTML file that compares runs: curves, load of experts, samples, configs, versions.",
        (
            "zaya report runs/tiny",
            "zaya report runs/tiny --output=tiny.html",
            "zaya report runs/tiny runs/wide runs/deep     # side by side, with their differences",
        ),
    )
    parser.add_argument("runs", nargs="+", type=pathlib.Path, metavar="RUN", help="run folder")
    parser.add_argument(
        "--output", type=pathlib.Path, default=pathlib.Path(OUTPUT), metavar="FILE", help="output file"
    )
    return parser


def _check_names(folders: Sequence[pathlib.Path]) -> None:
    for folder in folders:
        # The page tells runs apart by the names of their folders.
        if folders.count(folder) > 1:
            raise UserError(f"{folder} is named {folders.count(folder)} times; each run must be named once")
