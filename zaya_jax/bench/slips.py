"""Running sums with slips: a task in which thoughts go wrong in small steps, and can be put together again.

A question is letters with digits, `a3b6c4...`; the thought goes through them, says each again and behind it
the sum modulo seven so far, `a33b62c46...`. Its last digit is the answer. Each step slips with a small
probability, and then is one too large: as slips are all to one side, of long thoughts the commonest end is
wrong, and asking more often makes that surer. Of short ones the commonest is right. Who is shown the ends of
several thoughts goes on from what most of them say.

Letters: B batch, T time.
"""

import string
from collections.abc import Sequence

import numpy as np

from zaya_jax.data.batch import Batch
from zaya_jax.data.tokenizer import ByteTokenizer

NUM_DIGITS, MODULUS, SLIP = 12, 7, 0.08
STEP_TOKENS = 3
"""Of a step of a thought: a letter, its digit, the sum. It is also all that a tail needs."""
LETTERS = string.ascii_lowercase[:NUM_DIGITS]
ANSWER_PATTERN = rf"{LETTERS[-1]}\d(\d)"
MOST_TAILS = 4
LENGTH = 1 + 2 * NUM_DIGITS + (STEP_TOKENS + 1) * MOST_TAILS + 1 + STEP_TOKENS * NUM_DIGITS + 1
"""Tokens of the longest example: borders, question, tails, thought."""
BYTES = ByteTokenizer()


def make_question(numbers: np.random.Generator) -> str:
    """Digits, each behind its letter."""
    digits = numbers.integers(0, MODULUS, NUM_DIGITS)
    return "".join(f"{letter}{digit}" for letter, digit in zip(LETTERS, digits, strict=True))


def right_answer(question: str) -> str:
    """The sum of a question's digits modulo seven."""
    return str(sum(map(int, question[1::2])) % MODULUS)


def prompt_text(question: str, tails: Sequence[str] = ()) -> str:
    """What stands before a thought."""
    return "|".join([question, *tails])


def prompt_tokens(text: str) -> list[int]:
    """With BOS in front, and behind it the sign at which a thought begins."""
    return [BYTES.bos_id, *BYTES.encode(text + "=")]


def make_thought(numbers: np.random.Generator, question: str, *, first: int = 0, value: int = 0) -> str:
    """A thought from a step on, with its slips."""
    steps = []
    for place in range(first, NUM_DIGITS):
        digit = int(question[2 * place + 1])
        value = (value + digit + (numbers.random() < SLIP)) % MODULUS
        steps.append(f"{LETTERS[place]}{digit}{value}")
    return "".join(steps)


def make_continuation(numbers: np.random.Generator, question: str) -> tuple[list[str], str]:
    """Tails that end at one step, and a thought that goes on from what most of them say.

    Which is right is not told: it learns to agree, as a model that aggregates its own thoughts must.
    """
    done = int(numbers.integers(1, NUM_DIGITS + 1))
    base = int(numbers.integers(0, MODULUS))
    num_tails = int(numbers.integers(1, MOST_TAILS + 1))
    # Tails of a later round have more slips behind them than those of the first.
    values = (base + numbers.binomial(numbers.integers(0, NUM_DIGITS), SLIP, num_tails)) % MODULUS
    each, counts = np.unique(values, return_counts=True)
    value = int(numbers.choice(each[counts == counts.max()]))
    said = question[2 * done - 2 : 2 * done]
    thought = make_thought(numbers, question, first=done, value=value) or f"{said}{value}"
    return [f"{said}{other}" for other in values], thought


def make_batch(numbers: np.random.Generator, size: int) -> Batch:
    """Examples, half of them with tails; only of the thought something is learned."""
    tokens_BT = np.full((size, LENGTH), BYTES.pad_id, np.int32)
    weights_BT = np.zeros((size, LENGTH), np.float32)
    lengths_B = np.zeros(size, np.int64)
    for row in range(size):
        question = make_question(numbers)
        tails, thought = (
            make_continuation(numbers, question) if row % 2 else ([], make_thought(numbers, question))
        )
        prompt = prompt_tokens(prompt_text(question, tails))
        text = [*prompt, *BYTES.encode(thought), BYTES.eos_id]
        tokens_BT[row, : len(text)] = text
        weights_BT[row, len(prompt) - 1 : len(text) - 1] = 1  # by the token before each
        lengths_B[row] = len(text)
    time_T = np.arange(LENGTH, dtype=np.int32)
    real_BT = time_T < lengths_B[:, None]
    return Batch(
        tokens_BT,
        np.roll(tokens_BT, -1, axis=1),
        weights_BT,
        np.where(real_BT, time_T, 0).astype(np.int32),
        real_BT.astype(np.int32),
    )
