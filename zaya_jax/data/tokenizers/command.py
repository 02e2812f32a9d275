"""`zaya tokenizer`: trains a tokenizer on the texts of a corpus, or shows the properties of one."""

import argparse
import pathlib
import sysconfig
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax.data.corpora.corpus import VALIDATION_PERCENT
from zaya_jax.data.tokenizers.special_tokens import SpecialToken, SpecialTokenNames
from zaya_jax.data.tokenizers.tokenizer import TOOL_TAGS, HuggingFaceTokenizer
from zaya_jax.data.tokenizers.training import CHAT_SPECIALS, train_tokenizer
from zaya_jax.options import Parser
from zaya_jax.text_tables import name_column, number_column

# Default file for `inspect`, from the standard library.
_TEXT = "argparse.py"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya tokenizer` with its arguments."""
    options = _parse_options(argv)
    if options.what == "train":
        _train(options)
    else:
        _inspect(options)


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "tokenizer",
        "Train a byte-level BPE tokenizer, or show the properties of a Hugging Face tokenizer.json.",
        (
            "zaya tokenizer train tokenizers/stdlib --vocab-size 2048     # on Python's standard library",
            "zaya tokenizer train tokenizers/notes --source ~/notes --vocab-size 8192 --chat",
            "zaya tokenizer inspect tokenizers/stdlib/tokenizer.json --text README.md",
        ),
    )
    parser.add_argument("what", choices=("train", "inspect"), help="what to do")
    parser.add_argument("path", metavar="PATH", help="folder to create, or tokenizer.json to inspect")
    training = parser.add_argument_group("train")
    training.add_argument(
        "--source", default="stdlib", help='"stdlib" (default), a folder of texts or a file'
    )
    training.add_argument("--pattern", help='glob pattern of file names; default "*.py" for stdlib, else "*"')
    training.add_argument(
        "--vocab-size", type=int, default=2048, help="number of tokens; default %(default)s"
    )
    training.add_argument("--specials", nargs="+", default=[], metavar="TOKEN", help="further special tokens")
    training.add_argument(
        "--chat", action="store_true", help=f"add the special tokens of chats: {' '.join(CHAT_SPECIALS)}"
    )
    training.add_argument(
        "--tools", action="store_true", help=f"add the special tokens of tool calls: {' '.join(TOOL_TAGS)}"
    )
    training.add_argument(
        "--validation-percent",
        type=int,
        default=VALIDATION_PERCENT,
        help="share of the texts in percent that is held out, and does not train the tokenizer; give "
        "zaya data build the same value; default %(default)s",
    )
    training.add_argument("--overwrite", action="store_true", help="replace an existing tokenizer")
    inspection = parser.add_argument_group("inspect")
    inspection.add_argument("--text", metavar="FILE", help="text to tokenize; default: Python's argparse.py")
    for name in ("bos", "eos", "pad"):
        inspection.add_argument(
            f"--{name}-token", help=f"text of the {name.upper()} token; default: detected"
        )
    return parser.parse_args(argv)


def _train(options: argparse.Namespace) -> None:
    trained = train_tokenizer(
        options.path,
        source=options.source,
        pattern=options.pattern,
        vocab_size=options.vocab_size,
        specials=[
            *(CHAT_SPECIALS if options.chat else ()),
            *(TOOL_TAGS if options.tools else ()),
            *options.specials,
        ],
        validation_percent=options.validation_percent,
        overwrite=options.overwrite,
    )
    print(trained)
    # A warning and not an error: the tokenizer is usable.
    if trained.vocab_size < options.vocab_size:
        print(f"the text has too few pairs to merge for the requested {options.vocab_size:,} tokens")


def _inspect(options: argparse.Namespace) -> None:
    names = SpecialTokenNames(
        bos_token=options.bos_token, eos_token=options.eos_token, pad_token=options.pad_token
    )
    tokenizer = HuggingFaceTokenizer(options.path, names)
    Console(soft_wrap=True, highlight=False).print(_specials_table(tokenizer))
    for line in _lines(tokenizer, options.text):
        print(line)


def _specials_table(tokenizer: HuggingFaceTokenizer) -> Table:
    # Shows the rule as well, because a wrongly detected token would silently corrupt a corpus.
    table = Table(
        name_column("documents"), name_column("token"), number_column("id"), name_column("found by")
    )
    specials = tokenizer.specials
    rows = (("start with", specials.bos), ("end with", specials.eos), ("are padded with", specials.pad))
    for use, special in rows:
        table.add_row(use, *_cells(special))
    return table


def _cells(special: SpecialToken | None) -> tuple[str, str, str]:
    return (
        ("none: EOS is used", "", "") if special is None else (special.token, f"{special.id}", special.rule)
    )


def _lines(tokenizer: HuggingFaceTokenizer, text_file: str | None) -> list[str]:
    path = pathlib.Path(text_file or pathlib.Path(sysconfig.get_paths()["stdlib"], _TEXT))
    # Explicit, because the default encoding depends on the locale.
    text = path.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    known = "known" if tokenizer.token_bytes() is not None else "unknown"
    round_trip = "unchanged" if tokenizer.decode(ids) == text else "changed"
    size = len(text.encode())
    return [
        f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens; the bytes of single tokens are {known}",
        f"{path}: {size:,} bytes in {len(ids):,} tokens, {size / max(len(ids), 1):.3f} bytes per token; "
        f"decoding returns the text {round_trip}",
    ]
