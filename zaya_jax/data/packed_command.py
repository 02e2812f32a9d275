"""What `zaya data chats` and `zaya data preferences` have in common: their options, and what they print."""

from collections.abc import Sequence

import rich.box
import rich.console
import rich.table

from zaya_jax.data.left_out import describe_left_out
from zaya_jax.data.packed_corpus import PackedReport
from zaya_jax.data.shards import SPLITS
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column


def packing_parser(name: str, summary: str, examples: Sequence[str]) -> Parser:
    """The options of a verb that packs."""
    parser = Parser(name, summary, examples)
    parser.add_argument("folder", metavar="OUT", help="folder of the corpus to be")
    parser.add_argument("--source", required=True, help="a file of JSON lines, or a folder of *.jsonl")
    parser.add_argument(
        "--tokenizer", default="byte-chat", help='"byte-chat" (default) or the path of a tokenizer.json'
    )
    parser.add_argument(
        "--template", help='"zaya" or a Jinja file; default the tokenizer\'s own, else "zaya"'
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        required=True,
        help="tokens of a window: the run's data.sequence_length",
    )
    parser.add_argument("--validation-percent", type=int, default=5, help="share that is held out; default 5")
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    return parser


def print_report(report: PackedReport) -> None:
    """Prints how examples went into a corpus."""
    console = rich.console.Console()
    console.print(_make_split_table(report))
    console.print(_make_packing_table(report))


def print_left_out(report: PackedReport) -> None:
    """Prints what went into no window, by reason."""
    print(describe_left_out(report.corpus.folder, report.corpus.left_out), end="")


def _make_split_table(report: PackedReport) -> rich.table.Table:
    table = rich.table.Table(
        name_column("split"),
        *map(number_column, (report.kind.name, "windows", "tokens", "learned", "padding")),
        box=rich.box.SIMPLE,
        padding=0,
    )
    for name in SPLITS:
        split, num_tokens = report.corpus.split(name), report.num_tokens[name]
        counts = (split.documents, split.num_blocks, num_tokens, report.num_learned[name])
        table.add_row(name, *(f"{n:,}" for n in counts), f"{1 - num_tokens / split.tokens:.2%}")
    return table


def _make_packing_table(report: PackedReport) -> rich.table.Table:
    """What others would have made of the training examples; the first row is what was written."""
    table = rich.table.Table(
        name_column("training windows by"),
        *map(number_column, ("windows", "padding", f"{report.kind.name} cut")),
        box=rich.box.SIMPLE,
        padding=0,
    )
    for each in report.packings:
        table.add_row(each.name, f"{each.num_windows:,}", f"{each.padding:.2%}", f"{each.num_cut:,}")
    return table
