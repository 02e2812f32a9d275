"""What passes between the rounds of `markovian_rsa`: tails of thoughts, a prompt of them, answers."""

import pathlib
import re
from collections import Counter
from collections.abc import Callable, Sequence

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.text import UNKNOWN

QUESTION, CANDIDATES = "{question}", "{candidates}"
"""What of a prompt's file is replaced."""

Aggregate = Callable[[str, Sequence[str]], str]
"""Makes a prompt of a question and the tails of some candidates."""
AnswerOf = Callable[[str], str | None]
"""Finds the answer in what a candidate wrote behind its thought; None if there is none."""

# The report tells what its prompt asks for ([ZAYA1-8B] section VI-A a) and not its words: these are ours.
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
    """The prompt that is used where no other is given: question, numbered attempts, what is asked for."""
    return _filled(_ONE if len(tails) == 1 else _SEVERAL, question, tails)


def read_aggregation(file: str) -> Aggregate:
    """Reads a prompt of the user's: a text with {question} and {candidates} in it.

    Raises:
      ValueError: if one of the two is not in it exactly once.
    """
    text = pathlib.Path(file).read_text(encoding="utf-8", errors="replace")
    for name in (QUESTION, CANDIDATES):
        if text.count(name) != 1:
            raise ValueError(
                f"{file} has {name} {text.count(name)} times; a prompt must have {QUESTION} and {CANDIDATES} "
                "once each, where question and attempts go"
            )
    return lambda question, tails: _filled(text, question, tails)


def _filled(text: str, question: str, tails: Sequence[str]) -> str:
    attempts = "\n\n".join(f"Attempt {number}:\n{tail}" for number, tail in enumerate(tails, 1))
    # In one pass: a question that says "{candidates}" is not filled in turn.
    values = {QUESTION: question, CANDIDATES: attempts}
    return re.sub("|".join(map(re.escape, values)), lambda found: values[found.group()], text)


def tail_of(tokens: Sequence[int], num_tokens: int, tokenizer: Tokenizer) -> str:
    """The text of the last tokens of a thought, which is again no more than so many tokens."""
    text = tokenizer.decode(tokens[-num_tokens:]).lstrip(UNKNOWN)  # a character may have been cut in two
    # What is cut elsewhere may be encoded otherwise: the prompt's length is bounded all the same.
    while (excess := len(tokenizer.encode(text)) - num_tokens) > 0:
        text = text[excess:]
    return text


def find_answer(text: str) -> str | None:
    r"""The content of the last \boxed{...}, or else the last line that says anything."""
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def _last_boxed(text: str) -> str | None:
    start = text.rfind(r"\boxed{")
    if start < 0:
        return None
    depth, first = 0, start + len(r"\boxed")
    for place in range(first, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[first + 1 : place].strip()
    return None  # the budget ended within it


def answer_by_pattern(pattern: str) -> AnswerOf:
    """Finds answers by a regular expression: its last match, or that match's first group if it has one.

    Raises:
      ValueError: if it is no regular expression.
    """
    try:
        compiled = re.compile(pattern, re.MULTILINE)
    except re.error as error:
        raise ValueError(
            f"the pattern {pattern!r} is no regular expression: {error}; (?i)answer: (.+) would be one"
        ) from error

    def find(text: str) -> str | None:
        matches = list(compiled.finditer(text))
        return (matches[-1].group(min(1, compiled.groups)) or None) if matches else None

    return find


def vote(answers: Sequence[str | None]) -> tuple[int, dict[str, int]]:
    """The first of those who say what most say, and how many say what.

    Who has no answer has no vote. Of answers with as many votes that which came first counts, and where
    nobody has one the first of all is taken.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0, {}
    best = max(votes.values())
    winner = next(answer for answer in answers if answer is not None and votes[answer] == best)
    return answers.index(winner), dict(votes.most_common())
