"""`zaya data`: builds, inspects and verifies corpora."""

import argparse
import os
from collections.abc import Callable, Sequence

import rich.console
import rich.table
import rich.text

from zaya_jax.data.chats.command import build_chats, build_preferences
from zaya_jax.data.corpora.corpus import BLOCK_TOKENS, SHARD_TOKENS, VALIDATION_PERCENT, build_corpus
from zaya_jax.data.corpora.document_stream import ON_BAD
from zaya_jax.data.corpora.inspection import draw_tables, inspect
from zaya_jax.data.corpora.shards import SPLITS, Corpus, open_corpus, verify_corpus
from zaya_jax.data.sources.hub_stream import HubStream
from zaya_jax.data.sources.skipped import describe_skipped, printable
from zaya_jax.data.sources.text_sources import TextSource, open_source
from zaya_jax.data.tokenizers.special_tokens import SpecialTokenNames
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import UserError
from zaya_jax.options import Parser, add_help_config, check_at_least, load_config, run_subcommand
from zaya_jax.progress import ByteProgress
from zaya_jax.text_tables import dense_table

_EXAMPLES = (
    "zaya data build corpora/notes --source ~/notes                                   # any text",
    "zaya data chats corpora/chats --source chats.jsonl --sequence-length 512         # chats",
    "zaya data preferences corpora/pairs --source pairs.jsonl --sequence-length 512   # pairs of answers",
    "zaya data inspect corpora/notes                                                  # show the contents",
    "zaya data verify corpora/notes                                                   # compare with hashes",
)
_BUILD_EXAMPLES = (
    "zaya data build corpora/stdlib                                   # Python's standard library",
    "zaya data build corpora/notes --source ~/notes --pattern '*.md'  # the Markdown files of a folder",
    "zaya data build corpora/book --source input.txt                  # one file: its end is held out",
    "zaya data build corpora/web --source web.jsonl.zst --field content --on-bad skip",
    "zaya data build corpora/hub --source hub --pattern '*.parquet' --tokenizer tokenizer.json --deduplicate",
    "zaya data build corpora/fine --source HuggingFaceFW/fineweb --stream --subset sample-10BT",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya data` with its arguments.

    Raises:
      UserError: if an option, the source or the corpus is invalid.
    """
    parser = Parser(
        "data",
        "Build, inspect and verify corpora of token shards. `zaya data COMMAND --help` shows the options of "
        "each command.",
        _EXAMPLES,
    )
    run_subcommand(parser, SUBCOMMANDS, argv)


def build(argv: Sequence[str]) -> None:
    """Runs `zaya data build`: builds a corpus and prints its size."""
    parser = _build_parser()
    options = parser.parse_args(argv)
    # Opened before the progress display starts, so that an invalid source is reported at once.
    source = _open_source(options)
    names = SpecialTokenNames(bos_token=options.bos_token, eos_token=options.eos_token)
    try:
        with ByteProgress("tokens", source.num_bytes) as progress:
            corpus = build_corpus(
                options.folder,
                source=source,
                tokenizer=load_tokenizer(options.tokenizer, names),
                block_tokens=options.block_tokens,
                validation_percent=options.validation_percent,
                shard_tokens=options.shard_tokens,
                on_bad=options.on_bad,
                deduplicate=options.deduplicate,
                num_workers=options.workers,
                # A command can always be repeated after an interruption; library callers may not want
                # leftovers.
                resume=True,
                overwrite=options.overwrite,
                advance=progress.advance,
            )
    except OSError as error:
        error.add_note("run the same command again: it continues from the finished work")
        raise
    rich.console.Console().print(_make_table(corpus))
    print(describe_skipped(corpus.folder, corpus.left_out), end="")


def _open_source(options: argparse.Namespace) -> TextSource:
    """Opens the source of the options: files, or a stream of a data set on the hub.

    Raises:
      UserError: as `open_source` and `HubStream.open`, and for options that do not belong together.
    """
    streaming = {name: getattr(options, name) for name in ("subset", "split", "max_documents")}
    given = {name: value for name, value in streaming.items() if value is not None}
    if not options.stream:
        for name in given:
            raise UserError(f"--{name.replace('_', '-')} needs --stream")
        return open_source(options.source, pattern=options.pattern, field=options.field)
    if options.pattern is not None:
        raise UserError(
            "--pattern selects files, which --stream does not read by name; use --subset and --split"
        )
    check_at_least(options, max_documents=1)
    field = {} if options.field is None else {"field": options.field}
    return HubStream(source=options.source, **given, **field).open()


def _build_parser() -> Parser:
    parser = Parser(
        "data build",
        "Convert text to a corpus of token shards, with a held-out split. A source contains plain text, or "
        "records with a text field: JSON Lines (.jsonl, .ndjson, .json, also compressed), Parquet, and data "
        "sets saved by Hugging Face's datasets. Each text file and each record is a document. The same "
        "source yields the same bytes with any number of workers. To continue an interrupted build, run the "
        "same command again.",
        _BUILD_EXAMPLES,
    )
    parser.add_argument("folder", metavar="OUT", help="folder of the new corpus")
    _add_source_options(parser)
    _add_stream_options(parser)
    _add_format_options(parser)
    parser.add_argument(
        "--workers", type=int, default=len(os.sched_getaffinity(0)), metavar="N",
        help="worker processes for a large source; default: the number of cores, here %(default)s",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace an existing corpus")
    return parser


def _add_source_options(parser: Parser) -> None:
    parser.add_argument(
        "--source", default="stdlib",
        help='"stdlib" (default), a file, a folder, or the id of a data set on the Hugging Face hub',
    )  # fmt: skip
    parser.add_argument(
        "--pattern", help='glob pattern of the file names in a folder; default "*.py" for stdlib, else "*"'
    )
    parser.add_argument("--field", help='field or column of records that contains the text; default "text"')
    parser.add_argument("--deduplicate", action="store_true", help="skip exact copies of earlier texts")
    parser.add_argument(
        "--on-bad", choices=ON_BAD, default=ON_BAD[0],
        help="at a record that is not text: stop (default), or skip and list it. Empty documents and files "
        "that are not UTF-8 are always skipped and listed",
    )  # fmt: skip


def _add_stream_options(parser: Parser) -> None:
    group = parser.add_argument_group("data sets of the Hugging Face hub (needs the package datasets)")
    group.add_argument(
        "--stream",
        action="store_true",
        help="read --source from the hub row by row, without storing its files",
    )
    group.add_argument("--subset", metavar="NAME", help="subset (config) of the data set")
    group.add_argument("--split", metavar="NAME", help="split of the data set; default train")
    group.add_argument("--max-documents", type=int, metavar="N", help="number of rows to read; default all")


def _add_format_options(parser: Parser) -> None:
    parser.add_argument(
        "--tokenizer", default="byte", help='"byte" (default) or the path of a Hugging Face tokenizer.json'
    )
    for name, verb in (("bos", "starts"), ("eos", "ends")):
        parser.add_argument(
            f"--{name}-token", metavar="TOKEN",
            help=f"special token that {verb} documents; default: detected from the tokenizer's files",
        )  # fmt: skip
    parser.add_argument(
        "--validation-percent", type=int, default=VALIDATION_PERCENT, metavar="P",
        help="share of held-out documents in percent; default %(default)s",
    )  # fmt: skip
    for name, default, unit in (
        ("shard", SHARD_TOKENS, "file"),
        ("block", BLOCK_TOKENS, "block, the unit of reading"),
    ):
        parser.add_argument(
            f"--{name}-tokens", type=int, default=default, metavar="N",
            help=f"tokens per {unit}; default {default}",
        )  # fmt: skip


def verify(argv: Sequence[str]) -> None:
    """Runs `zaya data verify`: compares every byte of a corpus with its hashes."""
    parser = Parser(
        "data verify",
        "Compare every byte of a corpus with its hashes. Exit code 65 means that the corpus is damaged; one "
        "line per file says how.",
        ("zaya data verify corpora/stdlib", "zaya data verify corpora/web && zaya train"),
    )
    parser.add_argument("corpus", metavar="CORPUS", help="folder of a corpus")
    corpus = verify_corpus(parser.parse_args(argv).corpus)
    # Includes the hashes and the list of skipped files, and not only the shards.
    size = sum(file.bytes for file in corpus.files.values())
    print(f"verified: all {size:,} bytes of {corpus.folder} match their hashes")


def show(argv: Sequence[str]) -> None:
    """Runs `zaya data inspect`: prints the contents of a corpus, or what a run reads from its corpora."""
    parser = _show_parser()
    options, overrides = parser.parse_with_fields(argv)
    if options.samples < 0:
        raise UserError(f"--samples is {options.samples}; it must be 0 or above")
    if (options.corpus is None) == (options.config is None):
        raise UserError("zaya data inspect requires either a CORPUS or the --config of a run")
    console = rich.console.Console()
    if options.config is not None:
        for table in draw_tables(load_config(options.config, overrides)):
            console.print(table)
        return
    # Config fields are only meaningful together with --config; ignoring them would hide a mistake.
    if overrides:
        raise UserError(f"{overrides[0]} sets a config field, but there is no --config=FILE; add it")
    corpus = open_corpus(options.corpus)
    console.print(_make_table(corpus))
    print(describe_skipped(corpus.folder, corpus.left_out), end="")
    inspect(corpus, options.split, num_samples=options.samples, console=console)


def _show_parser() -> Parser:
    parser = Parser(
        "data inspect",
        "Show the contents of a corpus: counts, compressed size of the held-out text, document lengths, and "
        "the start of some documents. Document delimiters are colored; tokens without a loss are dim. With "
        "--config, show what that run reads from each of its corpora in each phase.",
        (
            "zaya data inspect corpora/stdlib",
            "zaya data inspect corpora/web --split train --samples 5",
            "zaya data inspect --config=configs/tiny.py --config.train.num_steps=1000",
        ),
    )
    parser.add_argument("corpus", metavar="CORPUS", nargs="?", help="folder of a corpus")
    parser.add_argument(
        "--config", metavar="FILE", help="config of a run; --config.SECTION.FIELD=VALUE sets its fields"
    )
    add_help_config(parser)
    parser.add_argument(
        "--split",
        choices=SPLITS,
        default="train",
        help="split whose documents are shown; default %(default)s",
    )
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="number of documents to show; default %(default)s"
    )
    return parser


def _make_table(corpus: Corpus) -> rich.table.Table:
    """One row per split. The bits per byte of gzip and xz are a baseline for models of the held-out text."""
    table = dense_table(
        "split",
        *("documents", "skipped", "bytes", "tokens", "gzip -9", "xz -9"),
        # Text instead of a string, because rich would interpret brackets in a path as markup.
        title=rich.text.Text(f"{printable(str(corpus.folder))}\n{printable(corpus.source)}"),
        caption="gzip and xz: bits per byte of the held-out files",
    )
    for name in SPLITS:
        split = corpus.split(name)
        counts = [f"{n:,}" for n in (split.documents, split.skipped, split.text_bytes, split.tokens)]
        rates = [_format_rate(n, split.text_bytes) for n in (split.gzip_9_bytes, split.xz_9_bytes)]
        table.add_row(name, *counts, *rates)
    return table


def _format_rate(compressed: int | None, raw: int) -> str:
    return "" if compressed is None else f"{8 * compressed / raw:.3f}"


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "build": build,
    "chats": build_chats,
    # Named differently, because `inspect` is already the function that does the work.
    "inspect": show,
    "preferences": build_preferences,
    "verify": verify,
}
