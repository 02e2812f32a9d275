"""`zaya data chats` and `zaya data preferences`: build packed corpora."""

import argparse
from collections.abc import Sequence
from typing import Any

import rich.console
import rich.table

from zaya_jax.data.chats.chat_corpus import build_chat_corpus
from zaya_jax.data.chats.labeled_corpus import build_labeled_corpus
from zaya_jax.data.chats.packed_corpus import PackedReport
from zaya_jax.data.chats.preference_corpus import build_preference_corpus
from zaya_jax.data.chats.record_formats import FORMATS
from zaya_jax.data.chats.records import RECORD_PATTERNS, find_format
from zaya_jax.data.corpora.corpus import VALIDATION_PERCENT
from zaya_jax.data.corpora.shards import SPLITS
from zaya_jax.data.sources.skipped import describe_skipped
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.files.hub import fetch
from zaya_jax.options import Parser
from zaya_jax.text_tables import dense_table

_CHAT_EXAMPLES = (
    "zaya data chats corpora/chats --source chats.jsonl --sequence-length 256     # as bytes",
    "zaya data chats corpora/chats --source chats --template chat_template.jinja --sequence-length 1024",
    "zaya data chats corpora/alpaca --source alpaca_data.json --format alpaca --sequence-length 512",
    "zaya data chats corpora/tools --source tools.jsonl --tokenizer byte-tools --sequence-length 2048",
    "zaya data chats corpora/chats_32k --source chats --tokenizer tokenizer.json --sequence-length 32768",
)
_PREFERENCE_EXAMPLES = (
    "zaya data preferences corpora/pairs --source pairs.jsonl --sequence-length 512     # as bytes",
    "zaya data preferences corpora/pairs --source pairs --tokenizer tokenizer.json --sequence-length 4096",
    "zaya data preferences corpora/votes --source votes.jsonl --unpaired --sequence-length 512   # for KTO",
)


def build_chats(argv: Sequence[str]) -> None:
    """Runs `zaya data chats`: builds a corpus of chats and prints its statistics."""
    summary = "Pack chats into the windows of a corpus, with a held-out split."
    options = _parser("data chats", summary, _CHAT_EXAMPLES).parse_args(argv)
    report = build_chat_corpus(options.folder, **_builder_arguments(options))
    _print_report(report)
    for trimming, count in report.trimmed.items():
        print(f"{trimming.value}: {count:,} chats")
    _print_skipped(report)


def build_preferences(argv: Sequence[str]) -> None:
    """Runs `zaya data preferences`: builds a corpus of pairs and prints its statistics."""
    summary = (
        "Pack pairs of answers, one of which is preferred, into the windows of a corpus, with a held-out "
        "split. "
        'A record has "chosen" and "rejected": lists of messages that start alike, or answers to its '
        '"prompt".'
    )
    parser = _parser("data preferences", summary, _PREFERENCE_EXAMPLES)
    parser.add_argument(
        "--unpaired",
        action="store_true",
        help='pack single answers for dpo.loss_type "kto": records have "prompt", "completion" and a boolean '
        '"label"; pairs are split in two',
    )
    options = parser.parse_args(argv)
    build = build_labeled_corpus if options.unpaired else build_preference_corpus
    report = build(options.folder, **_builder_arguments(options))
    _print_report(report)
    _print_skipped(report)


def _parser(name: str, summary: str, examples: Sequence[str]) -> Parser:
    parser = Parser(name, summary, examples)
    parser.add_argument("folder", metavar="OUT", help="folder of the new corpus")
    parser.add_argument(
        "--source",
        required=True,
        help="a file of JSON Lines (also compressed), a JSON array, Parquet, Arrow; a folder of such files; "
        "or the id of a data set on the Hugging Face hub",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help='format of the records: "messages" with role and content, "sharegpt" or "alpaca"; default: '
        "detected from the first record",
    )
    parser.add_argument(
        "--tokenizer",
        default="byte-chat",
        help='"byte-chat" (default), "byte-tools" or the path of a tokenizer.json',
    )
    parser.add_argument(
        "--template", help='"zaya" or the path of a Jinja file; default: the tokenizer\'s own, else "zaya"'
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        required=True,
        help="tokens per window; must equal data.sequence_length of the run",
    )
    parser.add_argument(
        "--validation-percent",
        type=int,
        default=VALIDATION_PERCENT,
        help="share of held-out examples in percent; default %(default)s",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing corpus")
    return parser


def _builder_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments of a builder; prints the record format if it was detected.

    Raises:
      UserError: if there is no record, or the first one has an unknown format.
    """
    # Downloaded once, so that the format is detected from the same revision that is packed.
    download = fetch(options.source, "dataset", patterns=RECORD_PATTERNS)
    source = options.source if download is None else str(download.folder)
    record_format = options.format
    if record_format is None:
        record_format, location = find_format(source)
        # The usual format needs no notice. Another one may have been detected by mistake.
        if record_format != "messages":
            print(f"records are read as --format {record_format}, detected from {location}")
    names = ("template", "sequence_length", "validation_percent", "overwrite")
    tokenizer = load_tokenizer(options.tokenizer)
    arguments = {"source": source, "record_format": record_format, "tokenizer": tokenizer}
    return arguments | {name: getattr(options, name) for name in names}


def _print_report(report: PackedReport) -> None:
    """Prints the splits and the packing of a corpus."""
    console = rich.console.Console()
    console.print(_make_split_table(report))
    console.print(_make_packing_table(report))


def _print_skipped(report: PackedReport) -> None:
    """Prints what was skipped, by reason."""
    print(describe_skipped(report.corpus.folder, report.corpus.left_out), end="")


def _make_split_table(report: PackedReport) -> rich.table.Table:
    table = dense_table("split", report.kind.name, "windows", "tokens", "learned", "padding")
    for name in SPLITS:
        split, num_tokens = report.corpus.split(name), report.num_tokens[name]
        counts = (split.documents, split.num_blocks, num_tokens, report.num_learned[name])
        # `split.tokens` includes padding: it counts whole windows.
        table.add_row(name, *(f"{n:,}" for n in counts), f"{1 - num_tokens / split.tokens:.2%}")
    return table


def _make_packing_table(report: PackedReport) -> rich.table.Table:
    """Compares ways to pack the training examples; the first row is what was written."""
    table = dense_table("training windows by", "windows", "padding", f"{report.kind.name} cut")
    for each in report.packings:
        table.add_row(each.name, f"{each.num_windows:,}", f"{each.padding:.2%}", f"{each.num_cut:,}")
    return table
