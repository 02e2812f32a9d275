"""`zaya data`: makes corpora of text, shows what is in them, and says whether they are what was written."""

import os
from collections.abc import Callable, Sequence

import rich.box
import rich.console
import rich.table
import rich.text

from zaya_jax.data import chat_corpus, preference_corpus
from zaya_jax.data.corpus import BLOCK_TOKENS, SHARD_TOKENS, VALIDATION_PERCENT, build_corpus
from zaya_jax.data.inspection import draw_tables, inspect
from zaya_jax.data.intake import ON_BAD
from zaya_jax.data.left_out import describe_left_out, printable
from zaya_jax.data.shards import SPLITS, Corpus, open_corpus, verify_corpus
from zaya_jax.data.sources import open_source
from zaya_jax.data.specials import SpecialNames
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.options import Parser, add_help_config, load_config
from zaya_jax.progress import ByteProgress
from zaya_jax.tables import name_column, number_column

_EXAMPLES = (
    "zaya data build corpora/notes --source ~/notes        # any text becomes a corpus",
    "zaya data chats --help                                # chats, packed whole into windows",
    "zaya data preferences --help                          # pairs of answers, one of them preferred",
    "zaya data inspect corpora/notes                       # what is in it",
    "zaya data verify corpora/notes                        # are its files what was written?",
    "zaya data build --help                                # the options of a verb",
)
_BUILD_EXAMPLES = (
    "zaya data build corpora/stdlib                                   # Python's own standard library",
    "zaya data build corpora/notes --source ~/notes --pattern '*.md'  # the Markdown files of a folder",
    "zaya data build corpora/book --source input.txt                  # one file: its end is held out",
    "zaya data build corpora/web --source web.jsonl.zst --field content --on-bad skip",
    "zaya data build corpora/hub --source hub --pattern '*.parquet' --tokenizer tokenizer.json --deduplicate",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya data` with the words behind it.

    Raises:
      ValueError: for a source or a corpus that is not there, and whatever else cannot be, in one sentence.
    """
    arguments = list(argv or ())
    if arguments and arguments[0] in VERBS:
        VERBS[arguments[0]](arguments[1:])
    else:
        _parser().parse_args(arguments)


def _parser() -> Parser:
    summary = (
        "Makes corpora of token shards, and looks at them. `zaya data VERB --help` has the options of each "
        "verb."
    )
    parser = Parser("data", summary, _EXAMPLES)
    parser.add_argument("verb", choices=list(VERBS), help="what to do")
    return parser


def build(argv: Sequence[str]) -> None:
    """Builds a corpus and prints what is in it."""
    parser = _build_parser()
    options = parser.parse_args(argv)
    source = open_source(options.source, pattern=options.pattern, field=options.field)
    names = SpecialNames(bos_token=options.bos_token, eos_token=options.eos_token)
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
                resume=True,
                overwrite=options.overwrite,
                advance=progress.advance,
            )
    except OSError as error:
        error.add_note("the same command goes on from what is done")
        raise
    rich.console.Console().print(_make_table(corpus))
    print(describe_left_out(corpus.folder, corpus.left_out), end="")


def _build_parser() -> Parser:
    parser = Parser(
        "data build",
        "Writes text as a corpus of token shards, with a part held out. A source is text, or records that "
        "have a field with text: JSON lines (.jsonl, .ndjson, .json, also with .gz or .zst), Parquet, and "
        "folders of Hugging Face's datasets. Each file of text and each record is a document. The same "
        "source gives the same bytes, however many processes make them; a build that was stopped goes on by "
        "the same command.",
        _BUILD_EXAMPLES,
    )
    parser.add_argument("folder", metavar="OUT", help="folder of the corpus to be")
    parser.add_argument("--source", default="stdlib", help='"stdlib" (default), a file or a folder')
    parser.add_argument(
        "--pattern", help='names of a folder\'s files to take; default "*.py" for stdlib, else "*"'
    )
    parser.add_argument("--field", help='of records: the field or column with the text; default "text"')
    parser.add_argument(
        "--tokenizer", default="byte", help='"byte" (default) or the path of a Hugging Face tokenizer.json'
    )
    for which, what in (("bos", "begins"), ("eos", "ends")):
        parser.add_argument(
            f"--{which}-token", metavar="TOKEN", help=f"the token that {what} documents; default: found"
        )
    parser.add_argument(
        "--workers", type=int, default=_num_cores(), metavar="N",
        help="processes that make tokens of a large source; default: as many as cores, here %(default)s",
    )  # fmt: skip
    parser.add_argument("--deduplicate", action="store_true", help="leave out copies, byte for byte")
    parser.add_argument(
        "--validation-percent", type=int, default=VALIDATION_PERCENT, metavar="P",
        help="share of the documents that is held out; default %(default)s",
    )  # fmt: skip
    for name, default, what in (
        ("shard", SHARD_TOKENS, "a file"),
        ("block", BLOCK_TOKENS, "a record of a file, which is read at once"),
    ):
        parser.add_argument(
            f"--{name}-tokens",
            type=int,
            default=default,
            metavar="N",
            help=f"tokens {what}; default {default}",
        )
    parser.add_argument(
        "--on-bad", choices=ON_BAD, default=ON_BAD[0],
        help="at a record that is no text: stop (default), or skip and name it. Files of text that are not "
        "UTF-8, and what is empty, are left out and named in any case",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="replace a corpus that is there")
    return parser


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def verify(argv: Sequence[str]) -> None:
    """Reads every byte of a corpus and says that it is as it was written."""
    parser = Parser(
        "data verify",
        "Reads every byte of a corpus and holds it against its hash. A damaged one is told by exit code 65, "
        "with a sentence for each file.",
        ("zaya data verify corpora/stdlib", "zaya data verify corpora/web && zaya train"),
    )
    parser.add_argument("corpus", metavar="CORPUS", help="folder of a corpus")
    corpus = verify_corpus(parser.parse_args(argv).corpus)
    size = sum(file.bytes for file in corpus.files.values())
    print(f"verified: all {size:,} bytes of {corpus.folder} are as they were written")


def show(argv: Sequence[str]) -> None:
    """Prints what is in a corpus, or what a run draws from each of its own."""
    parser = Parser(
        "data inspect",
        "Shows what a corpus holds: counts, how well the held-out text compresses, how long documents are, "
        "and how they begin. Marks of a document's begin and end are coloured; tokens that no loss is taken "
        "of are dim. With --config it shows what that run draws from each of its corpora, phase by phase.",
        (
            "zaya data inspect corpora/stdlib",
            "zaya data inspect corpora/web --split train --samples 5",
            "zaya data inspect --config=configs/tiny.py --config.train.num_steps=1000",
        ),
    )
    parser.add_argument("corpus", metavar="CORPUS", nargs="?", help="folder of a corpus")
    parser.add_argument(
        "--config", metavar="FILE", help="of a run, whose fields --config.SECTION.FIELD=VALUE sets"
    )
    add_help_config(parser)
    parser.add_argument(
        "--split", choices=SPLITS, default="train", help="whose documents are shown; default %(default)s"
    )
    parser.add_argument(
        "--samples", type=int, default=3, metavar="N", help="documents to show; default %(default)s"
    )
    options, overrides = parser.parse_with_fields(argv)
    if options.samples < 0:
        raise ValueError(f"--samples is {options.samples}; it must be 0 or above")
    if (options.corpus is None) == (options.config is None):
        raise ValueError("it takes a CORPUS to look into, or the --config of a run; give one of them")
    console = rich.console.Console()
    if options.config is not None:
        for table in draw_tables(load_config(options.config, overrides)):
            console.print(table)
        return
    if overrides:
        raise ValueError(f"{overrides[0]} sets a field of a run, and there is no --config=FILE of one")
    corpus = open_corpus(options.corpus)
    console.print(_make_table(corpus))
    print(describe_left_out(corpus.folder, corpus.left_out), end="")
    inspect(corpus, options.split, num_samples=options.samples, console=console)


def _make_table(corpus: Corpus) -> rich.table.Table:
    """A row a split; the bits per byte are what a model of the held-out texts has to beat."""
    table = rich.table.Table(
        name_column("split"),
        *map(number_column, ("documents", "skipped", "bytes", "tokens", "gzip -9", "xz -9")),
        title=rich.text.Text(f"{printable(str(corpus.folder))}\n{printable(corpus.source)}"),
        caption="gzip and xz: bits per byte of the held-out files",
        box=rich.box.SIMPLE,
        padding=0,
    )
    for name in SPLITS:
        split = corpus.split(name)
        counts = [f"{n:,}" for n in (split.documents, split.skipped, split.text_bytes, split.tokens)]
        rates = [_format_rate(n, split.text_bytes) for n in (split.gzip_9_bytes, split.xz_9_bytes)]
        table.add_row(name, *counts, *rates)
    return table


def _format_rate(compressed: int | None, raw: int) -> str:
    return "" if compressed is None else f"{8 * compressed / raw:.3f}"


VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "build": build,
    "chats": chat_corpus.main,
    "inspect": show,
    "preferences": preference_corpus.main,
    "verify": verify,
}
