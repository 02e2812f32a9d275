"""Compiles grammars for the tokens of a model, with llguidance."""

import collections
import functools
import importlib
import importlib.util
import json
import pathlib
import re
import signal
import subprocess
import sys
import threading
from typing import Any

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.structured.constraint import DEAD_END, Constraint
from zaya_jax.inference.structured.grammar import Grammar
from zaya_jax.platform.shell import install_command

PACKAGE = "llguidance"
MAX_WAIT_SECONDS = 60.0
"""Time that the process of a grammar may take on a busy machine; its own limit counts computing only."""
MAX_CACHED = 32
"""Compiled grammars that are kept, least recently used first to go; clients repeat theirs."""
_MAX_MESSAGE = 300
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[(.*)\]")


def is_available() -> bool:
    """Returns whether the package of the `structured` extra is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def require_package(purpose: str) -> None:
    """Checks that the package of the `structured` extra is installed.

    Args:
      purpose: what needs it: an option or a field.

    Raises:
      UserError: if not, with the command that installs it.
    """
    if not is_available():
        raise UserError(f"{purpose} needs {PACKAGE}, which is not installed: {install_command('structured')}")


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int):
        """Remembers what grammars are compiled for.

        Args:
          tokenizer: tokenizer of the model.
          vocab_size: V of the model, which may be larger than the tokenizer's.
        """
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[str, Any] = collections.OrderedDict()

    def prepare(self) -> None:
        """Reads the vocabulary, which takes seconds for a large one, so that no request waits for it.

        Raises:
          UserError: as `compile`, for the package and the tokenizer.
        """
        _ = self._vocabulary

    def compile(
        self, grammar: Grammar, think_ids: tuple[int, int] | None = None, *, name: str = "the schema"
    ) -> Constraint:
        """Compiles a grammar.

        Args:
          grammar: the grammar.
          think_ids: tokens that open and close a thought, during which the grammar waits; None without
            thoughts.
          name: how error messages call what the user wrote.

        Raises:
          UserError: if the grammar is invalid, not supported or too complex, or takes too long to compile;
            also if the package is not installed, or the tokenizer cannot be constrained.
        """
        matcher = self._find(grammar.source)
        if matcher is None:
            vocabulary = self._vocabulary
            # First elsewhere: what takes too long here could not be ended.
            check_in_process(grammar.source, self._vocab_size, name)
            # Not under the lock: one large grammar must not delay those that are compiled already.
            matcher = _process_module().compile_grammar(vocabulary, grammar.source)
            if matcher.is_error():
                raise _refused(matcher.get_error(), name)
            self._keep(grammar.source, matcher)
        return Constraint(matcher, self._vocab_size, self._tokenizer.eos_id, think_ids)

    @functools.cached_property
    def _vocabulary(self) -> Any:
        require_package("structured output")
        tokens = _vocabulary_bytes(self._tokenizer, self._vocab_size)
        process = _process_module()
        return process.load_vocabulary(process.Vocabulary(tokens, self._tokenizer.eos_id))

    def _find(self, source: str) -> Any:
        with self._lock:
            if source in self._compiled:
                self._compiled.move_to_end(source)
            return self._compiled.get(source)

    def _keep(self, source: str, matcher: Any) -> None:
        with self._lock:
            self._compiled[source] = matcher
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)


def check_in_process(source: str, vocab_size: int, name: str) -> None:
    """Compiles a grammar in a separate process, which is killed if it takes too much time or memory.

    Args:
      source: grammar in llguidance's format.
      vocab_size: V; rules may name special tokens by number.
      name: how error messages call what the user wrote.

    Raises:
      UserError: if the grammar is refused, or exceeds a limit.
    """
    # -P: a module in the current folder must not replace one that the script imports.
    command = [sys.executable, "-P", str(pathlib.Path(__file__).with_name("grammar_process.py"))]
    request = json.dumps({"source": source, "vocab_size": vocab_size})
    try:
        result = subprocess.run(
            command, input=request, capture_output=True, text=True, timeout=MAX_WAIT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{name} could not be compiled in {MAX_WAIT_SECONDS:g} seconds; retry later"
        ) from None
    if result.returncode == -signal.SIGXCPU:
        raise UserError(
            f"{name} is too complex: compiling it takes over {_process_module().COMPILE_SECONDS} seconds; "
            "simplify it"
        )
    # llguidance aborts where it cannot allocate, as the limit of the process makes it.
    if result.returncode:
        raise UserError(f"{name} is too complex: compiling it takes too much memory; simplify it")
    if error := json.loads(result.stdout)["error"]:
        raise _refused(error, name)


def _refused(error: str, name: str) -> UserError:
    """Returns the error of a grammar that llguidance refuses."""
    if unimplemented := _UNIMPLEMENTED.search(error):
        return UserError(f"{name} has {unimplemented[1]:.80}, which is not supported; remove it")
    if "coerce_one_of" in error:
        return UserError(f'{name} has "oneOf" with schemas that may accept the same value; use "anyOf"')
    # T5's vocabulary, for instance, has no braces.
    if DEAD_END in error:
        return UserError(f"{name} requires text that no token of the vocabulary spells")
    # Messages about a regular expression have several lines; the library's hints are in the last ones.
    message = " ".join(error.replace("<non-verbose/>", "").split())
    return UserError(f"{name} cannot be enforced: {message[:_MAX_MESSAGE]}")


def _process_module() -> Any:
    # Imported late: it needs the package of the `structured` extra.
    return importlib.import_module("zaya_jax.inference.structured.grammar_process")


def _vocabulary_bytes(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """Returns the bytes of every token of a model; empty for those that spell no text.

    Raises:
      UserError: if the bytes of a token depend on the tokens around it.
    """
    if tokenizer.token_bytes() is None:
        raise UserError(
            f'the tokenizer "{tokenizer.name}" writes a token differently in different places, so that no '
            "grammar can constrain its texts; use a tokenizer of bytes, BPE or Unigram"
        )
    # The unknown token is written as a name or as nothing, and never as the text that it replaced.
    silent = {*tokenizer.special_names, tokenizer.unknown_id}
    num_tokens = min(vocab_size, tokenizer.vocab_size)
    spelled = [b"" if token in silent else tokenizer.spelling(token) for token in range(num_tokens)]
    return spelled + [b""] * (vocab_size - num_tokens)
