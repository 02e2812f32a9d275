"""The option `--json-schema` of `zaya generate` and `zaya chat`."""

import argparse
import pathlib

from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json
from zaya_jax.inference.loading import LoadedRun
from zaya_jax.inference.structured.compiler import GrammarCompiler, require_package
from zaya_jax.inference.structured.constraint import Constraint
from zaya_jax.inference.structured.grammar import Grammar, json_schema_grammar
from zaya_jax.options import Parser


def add_schema_option(parser: Parser) -> None:
    """Adds the option."""
    parser.add_argument(
        "--json-schema",
        metavar="FILE",
        help="answer with JSON that this JSON schema accepts; an answer that reaches the maximum number of "
        "tokens is cut",
    )


def read_schema_option(options: argparse.Namespace) -> Grammar | None:
    """Returns the grammar of the option's schema; None without the option. It reads no weights.

    Raises:
      UserError: if the schema is missing or refused, or the package that it needs is not installed.
    """
    if options.json_schema is None:
        return None
    require_package("--json-schema")
    path = pathlib.Path(options.json_schema)
    if not path.is_file():
        raise UserError(f"--json-schema is {path}, which is not a file")
    return json_schema_grammar(read_json(path), str(path))


def compile_option(run: LoadedRun, grammar: Grammar | None, options: argparse.Namespace) -> Constraint | None:
    """Compiles the grammar of the option for a run; returns None for None.

    Raises:
      UserError: as `GrammarCompiler.compile`.
    """
    if grammar is None:
        return None
    # The padded vocabulary of the model, because masks have a bit for each logit.
    compiler = GrammarCompiler(run.tokenizer, run.model.config.vocab_size)
    return compiler.compile(grammar, name=options.json_schema)
