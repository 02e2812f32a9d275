"""Aggregation between the rounds of `markovian_rsa`: tails, prompts made of tails, answers and votes."""

import pathlib
import re
from collections import Counter
from collections.abc import Callable, Sequence

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.text_stream import UNKNOWN

QUESTION, CANDIDATES = "{question}", "{candidates}"
"""Placeholders of an aggregation prompt."""

Aggregate = Callable[[str, Sequence[str]], str]
"""Makes a prompt from a question and the tails of some candidates."""
AnswerOf = Callable[[str], str | None]
"""Finds the answer in what a candidate wrote after its thought; None if there is none."""

# The report describes the purpose of its prompt ([ZAYA1-8B] section VI-A a), not its words; these are ours.
_SEVERAL = """\
{question}

Below are the ends of several attempts at this problem. Each may be unfinished or wrong; they may disagree.

{candidates}

Consider the attempts, keep what is right in them, and give the best solution."""
_ONE = """\
{question}

Below is the end of an attempt at this problem. It may be unfinished or wrong.

{candidates}

Go on from it, and give the best solution."""


def aggregate(question: str, tails: Sequence[str]) -> str:
    """Returns the default aggregation prompt: the question, numbered attempts, and an instruction."""
    return _filled(_ONE if len(tails) == 1 else _SEVERAL, question, tails)


def read_aggregation(file: str) -> Aggregate:
    """Reads a custom aggregation prompt: a text with {question} and {candidates} in it.

    Raises:
      UserError: unless each of the two is in the text exactly once.
    """
    text = pathlib.Path(file).read_text(encoding="utf-8", errors="replace")
    for name in (QUESTION, CANDIDATES):
        if text.count(name) != 1:
            raise UserError(
                f"{file} has {name} {text.count(name)} times; an aggregation prompt must have {QUESTION} and "
                f"{CANDIDATES} exactly once each"
            )
    return lambda question, tails: _filled(text, question, tails)


def _filled(text: str, question: str, tails: Sequence[str]) -> str:
    attempts = "\n\n".join(f"Attempt {number}:\n{tail}" for number, tail in enumerate(tails, 1))
    # In one pass, so that a "{candidates}" within the question is not replaced.
    values = {QUESTION: question, CANDIDATES: attempts}
    return re.sub("|".join(map(re.escape, values)), lambda match: values[match.group()], text)


def tail_of(tokens: Sequence[int], num_tokens: int, tokenizer: Tokenizer) -> str:
    """Returns the text of the last tokens of a thought; encoded again it has at most `num_tokens` tokens."""
    text = tokenizer.decode(tokens[-num_tokens:]).lstrip(UNKNOWN)  # the cut may have split a character
    # The text may be encoded differently after the cut; the bound of the prompt's length (eq. 23) must hold.
    while (excess := len(tokenizer.encode(text)) - num_tokens) > 0:
        # Cut as many characters as there are excess tokens, and count again.
        text = text[excess:]
    return text


def find_answer(text: str) -> str | None:
    r"""Returns the content of the last \boxed{...}, or else the last line that is not empty."""
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, first = 0, start + len(r"\boxed")
    for index in range(first, len(text)):
        # Braces within the box belong to the answer, as in \boxed{\frac{1}{2}}.
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[first + 1 : index].strip()
    return None  # the budget ended inside the box


def answer_by_pattern(pattern: str) -> AnswerOf:
    """Returns a function that finds answers by a pattern: its last match, or the first group of it.

    Raises:
      UserError: if the pattern is not a regular expression.
    """
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise UserError(
            f"the pattern {pattern!r} is not a regular expression: {error}; an example is (?i)answer: (.+)"
        ) from error

    def find(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        # Group 0 is the whole match, which counts for a pattern without groups.
        return (matches[-1].group(min(1, compiled.groups)) or None) if matches else None

    return find


def vote(answers: Sequence[str | None]) -> tuple[int, dict[str, int]]:
    """Returns the index of the first candidate with the majority answer, and the votes of each answer.

    A candidate without an answer has no vote. On a tie the answer that came first wins. If no candidate has
    an answer, the index is 0.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0, {}
    best = max(votes.values())
    winner = next(answer for answer in answers if answer is not None and votes[answer] == best)
    return answers.index(winner), dict(votes.most_common())
