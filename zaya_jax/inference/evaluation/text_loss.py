"""The loss of texts by file and by position, for `zaya eval --text`.

Letters: J classes of positions, N tokens of a text; 2 is nats and tokens.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.evaluation.scoring import Scorer, scored_batches
from zaya_jax.inference.evaluation.scoring_requests import rolling_requests
from zaya_jax.train.metrics.files import bits_per_byte


@dataclasses.dataclass(frozen=True)
class Text:
    """A text to evaluate, with its tokens and the size that bits per byte refer to."""

    name: str
    num_bytes: int
    """Size in UTF-8, which makes models with different tokenizers comparable."""
    tokens_N: UInt[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True)
class TextLoss:
    """The loss of a text."""

    name: str
    num_bytes: int
    num_tokens: int
    nats: float
    """Sum of the cross-entropy over the tokens."""

    def to_json(self) -> dict[str, Any]:
        """Returns the sums and the derived metrics."""
        return {
            **dataclasses.asdict(self),
            "bits_per_byte": bits_per_byte(self.nats, self.num_bytes),
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
        }

    @property
    def nats_per_token(self) -> float:
        """Mean cross-entropy of the tokens of the text, natural logarithm."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Exponential of the mean cross-entropy."""
        # math.exp overflows above 709.
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf


@dataclasses.dataclass(frozen=True)
class PositionLoss:
    """The loss of tokens that have similar context lengths."""

    first: int
    """Minimum context length in tokens, the prefix included."""
    last: int
    """Maximum context length in tokens."""
    num_tokens: int
    nats: float

    def to_json(self) -> dict[str, Any]:
        """Returns the sums and their ratio."""
        return dataclasses.asdict(self) | {"nats_per_token": self.nats / self.num_tokens}


@dataclasses.dataclass(frozen=True)
class TextReport:
    """The loss of several texts."""

    texts: tuple[TextLoss, ...]
    positions: tuple[PositionLoss, ...]
    """Loss by context length, between powers of two; empty classes are omitted."""

    @property
    def total(self) -> TextLoss:
        """Loss of all texts together."""
        sums = (
            sum(getattr(text, name) for text in self.texts) for name in ("num_bytes", "num_tokens", "nats")
        )
        return TextLoss("in all", *sums)

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON values."""
        return {
            "files": [text.to_json() for text in self.texts],
            "total": self.total.to_json(),
            "positions": [position.to_json() for position in self.positions],
        }


def read_texts(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the names and texts of files; line endings stay as they are.

    Raises:
      UserError: for a file that is empty or not UTF-8.
    """
    for file in files:
        try:
            # Decode bytes instead of reading text, which would translate line endings and change the number
            # of bytes.
            text = pathlib.Path(file).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(
                f"{file} is not UTF-8 text: byte {error.start} does not begin a character"
            ) from None
        if not text:
            raise UserError(f"{file} is empty; a text to evaluate must have a character")
        yield file, text


def encode_texts(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Text]:
    """Encodes texts.

    Raises:
      UserError: for a text without tokens.
    """
    all_tokens = tokenizer.encode_documents(text for _, text in texts)
    encoded = [
        Text(name, len(text.encode()), tokens_N)
        for (name, text), tokens_N in zip(texts, all_tokens, strict=True)
    ]
    for text in encoded:
        if not len(text.tokens_N):
            raise UserError(f"{text.name} has no tokens with the tokenizer {tokenizer.name}")
    return encoded


def evaluate_texts(
    scorer: Scorer, texts: Sequence[Text], *, advance: Callable[[int], None] = lambda _: None
) -> TextReport:
    """Evaluates texts; every token is scored once, with as much context as fits.

    Args:
      scorer: the model.
      texts: texts, each with at least one token.
      advance: function that is called after each batch with its number of scored tokens.
    """
    windows = [
        rolling_requests(text.tokens_N, prefix_id=scorer.prefix_id, length=scorer.length) for text in texts
    ]
    requests = [request for of_text in windows for request in of_text]
    # Index of the text of each window, to add up the windows of a text.
    text_of = [number for number, of_text in enumerate(windows) for _ in of_text]
    nats, sums = [0.0] * len(texts), []
    for batch in scored_batches(scorer, requests):
        # Sum in Python's float64: in float32 the sum over a long text would lose its last windows.
        for number, log_prob in zip(batch.requests, batch.log_probs, strict=True):
            nats[text_of[number]] -= log_prob
        sums.append((np.negative(batch.log_prob_J), batch.num_J))
        advance(sum(requests[number].num_scored for number in batch.requests))
    losses = (
        TextLoss(text.name, text.num_bytes, len(text.tokens_N), sum_of_text)
        for text, sum_of_text in zip(texts, nats, strict=True)
    )
    sums_2J: np.ndarray = np.asarray(sums, np.float64).sum(axis=0)
    return TextReport(tuple(losses), _positions(sums_2J, scorer.length))


def _positions(sums_2J: np.ndarray, length: int) -> tuple[PositionLoss, ...]:
    """Returns the loss of each class of positions that has tokens."""
    return tuple(
        # The context may end within the last class.
        PositionLoss(2**j, min(2 ** (j + 1) - 1, length), int(num), float(nats))
        for j, (nats, num) in enumerate(sums_2J.T)
        if num
    )
