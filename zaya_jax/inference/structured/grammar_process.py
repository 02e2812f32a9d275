"""The process that tries to compile a grammar, so that a hostile one costs a bounded time and memory.

Compiling is usually a matter of milliseconds, but a few schemas take minutes (`multipleOf` with a large
prime) or gigabytes. Threads cannot be killed, so that this file is run as a script: it reads a grammar from
standard input and prints the error as JSON. It imports nothing but llguidance, and starts in a tenth of a
second.
"""

import json
import resource
import sys
from collections.abc import Sequence

import llguidance

COMPILE_SECONDS = 3
"""Processor time of compiling a grammar. Usual schemas take milliseconds, one of 100 KiB up to a second."""
MAX_MEMORY_BYTES = 1 << 30
"""Address space of the process in bytes; Python and llguidance need about 100 MB of it."""
_LIMITS = {
    # Every step of a compiled grammar is bounded too: by these numbers a mask takes at most some 20 ms.
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    # 1 to 2 kB each.
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    # Otherwise messages contain the whole grammar.
    "verbose_errors": False,
}


_PROBED_TOKENS = 3


class Vocabulary:
    """A vocabulary in the form that llguidance reads.

    Attributes:
      tokens: bytes of each token, and names of those that no text contains.
      special_token_ids: tokens that text never matches.
      eos_token_id: end token.
      bos_token_id: always None.
    """

    def __init__(self, tokens: Sequence[bytes], eos_id: int):
        """Creates a vocabulary.

        Args:
          tokens: bytes of each token; empty for a special token, or one that no text contains.
          eos_id: end token, one of those without bytes.
        """
        self.special_token_ids = [token for token, raw in enumerate(tokens) if not raw]
        # Each with its own name: where a rule names a token by number, llguidance allows all that share one.
        self.tokens = [raw or b"<%d>" % token for token, raw in enumerate(tokens)]
        self.eos_token_id, self.bos_token_id = eos_id, None

    def __call__(self, text: bytes) -> list[int]:
        """Returns no tokens: llguidance needs them only to force text, which our grammars disable."""
        del text
        return []


def load_vocabulary(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Returns a vocabulary as a tree of llguidance. It takes a second for 262,144 tokens."""
    return llguidance.LLTokenizer(
        llguidance.TokenizerWrapper(vocabulary),
        n_vocab=len(vocabulary.tokens),
        eos_token=vocabulary.eos_token_id,
    )


def compile_grammar(tokenizer: llguidance.LLTokenizer, source: str) -> llguidance.LLMatcher:
    """Returns the matcher of a grammar, which has an error if the grammar is invalid or too complex."""
    limits = llguidance.LLParserLimits(**_LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=limits)
    probe = matcher.deep_copy()
    # Some limits apply to masks only. The largest sets of choices are those at the start: all fields of the
    # outermost object follow its bracket.
    for _ in range(_PROBED_TOKENS):
        if probe.is_error() or probe.is_stopped():
            break
        # Any allowed token will do, so the lowest.
        allowed = int.from_bytes(probe.compute_bitmask(), "little")
        if allowed and not probe.is_error():
            probe.consume_token((allowed & -allowed).bit_length() - 1)
    return probe if probe.is_error() else matcher


def main() -> None:
    """Compiles the grammar of standard input, and prints its error message, "" for none."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    # The kernel ends the process, even within a single call. Processor time does not depend on other load.
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_SECONDS, COMPILE_SECONDS + 1))
    # A crash must not leave a core dump behind.
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The parent has checked the size of the schema.
    request = json.load(sys.stdin)
    # Single bytes suffice to find out whether a grammar compiles; other tokens only have numbers.
    tokens = [bytes([byte]) for byte in range(256)] + [b""] * max(0, request["vocab_size"] - 256)
    tokenizer = load_vocabulary(Vocabulary([*tokens, b""], len(tokens)))
    matcher = compile_grammar(tokenizer, request["source"])
    json.dump({"error": matcher.get_error()}, sys.stdout)


if __name__ == "__main__":
    main()
