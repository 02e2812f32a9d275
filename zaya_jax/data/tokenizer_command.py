"""`zaya tokenizer`: trains a tokenizer on the texts of a corpus, or says what one is."""

import argparse
import pathlib
import sysconfig
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from zaya_jax.data.corpus import VALIDATION_PERCENT
from zaya_jax.data.specials import Special, SpecialNames
from zaya_jax.data.tokenizer import HuggingFaceTokenizer
from zaya_jax.data.tokenizer_training import CHAT_SPECIALS, train_tokenizer
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column

_TEXT = "argparse.py"
"""Of the standard library, for who gives no other."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya tokenizer` with the words behind it."""
    options = _parse_options(argv)
    if options.what == "train":
        _train(options)
    else:
        _inspect(options)


def _parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        "tokenizer",
        "Trains a byte-level BPE tokenizer, or says what a Hugging Face tokenizer.json is.",
        (
            "zaya tokenizer train tokenizers/stdlib --vocab-size 2048     # on Python's own library",
            "zaya tokenizer train tokenizers/notes --source ~/notes --vocab-size 8192 --chat",
            "zaya tokenizer inspect tokenizers/stdlib/tokenizer.json --text README.md",
        ),
    )
    parser.add_argument("what", choices=("train", "inspect"))
    parser.add_argument("path", metavar="PATH", help="the folder to be, or the tokenizer.json to inspect")
    training = parser.add_argument_group("train")
    training.add_argument(
        "--source", default="stdlib", help='"stdlib" (default), a folder of texts or a file'
    )
    training.add_argument("--pattern", help='names of the files to take; default "*.py" for stdlib, else "*"')
    training.add_argument("--vocab-size", type=int, default=2048, help="tokens in all (default: %(default)s)")
    training.add_argument("--specials", nargs="+", default=[], metavar="TOKEN", help="further special tokens")
    training.add_argument("--chat", action="store_true", help=f"those of chats: {' '.join(CHAT_SPECIALS)}")
    training.add_argument(
        "--validation-percent",
        type=int,
        default=VALIDATION_PERCENT,
        help="share of the texts that the corpus will hold out, and this leaves out (default: %(default)s)",
    )
    training.add_argument("--overwrite", action="store_true", help="replace a tokenizer that is there")
    inspection = parser.add_argument_group("inspect")
    inspection.add_argument("--text", metavar="FILE", help="to count tokens of; default Python's argparse.py")
    for which in ("bos", "eos", "pad"):
        inspection.add_argument(f"--{which}-token", help="its name; default: found")
    return parser.parse_args(argv)


def _train(options: argparse.Namespace) -> None:
    trained = train_tokenizer(
        options.path,
        source=options.source,
        pattern=options.pattern,
        vocab_size=options.vocab_size,
        specials=[*(CHAT_SPECIALS if options.chat else ()), *options.specials],
        validation_percent=options.validation_percent,
        overwrite=options.overwrite,
    )
    print(trained)
    if trained.vocab_size < options.vocab_size:
        print(f"the text has no more pairs to merge: {options.vocab_size:,} tokens were asked for")


def _inspect(options: argparse.Namespace) -> None:
    names = SpecialNames(
        bos_token=options.bos_token, eos_token=options.eos_token, pad_token=options.pad_token
    )
    tokenizer = HuggingFaceTokenizer(options.path, names)
    Console(soft_wrap=True, highlight=False).print(_specials_table(tokenizer))
    for line in _lines(tokenizer, options.text):
        print(line)


def _specials_table(tokenizer: HuggingFaceTokenizer) -> Table:
    table = Table(
        name_column("documents"), name_column("token"), number_column("id"), name_column("found by")
    )
    specials = tokenizer.specials
    rows = (("begin with", specials.bos), ("end with", specials.eos), ("are filled up with", specials.pad))
    for what, special in rows:
        table.add_row(what, *_cells(special))
    return table


def _cells(special: Special | None) -> tuple[str, str, str]:
    return (
        ("none: EOS does it", "", "") if special is None else (special.token, f"{special.id}", special.rule)
    )


def _lines(tokenizer: HuggingFaceTokenizer, text_file: str | None) -> list[str]:
    path = pathlib.Path(text_file or pathlib.Path(sysconfig.get_paths()["stdlib"], _TEXT))
    text = path.read_text(encoding="utf-8")
    ids = tokenizer.encode(text)
    tells = "tell" if tokenizer.token_bytes() is not None else "do not tell"
    back = "comes back" if tokenizer.decode(ids) == text else "does not come back"
    size = len(text.encode())
    return [
        f"{tokenizer.kind}, {tokenizer.vocab_size:,} tokens, which {tells} their bytes",
        f"{path}: {size:,} bytes in {len(ids):,} tokens, {size / max(len(ids), 1):.3f} bytes a token; "
        f"the text {back} as it was",
    ]
