"""The loss of texts by file and by position: what `zaya eval --text` says.

Letters: J classes of positions, N tokens of a text; 2 is nats and tokens.
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.requests import rolling_requests
from zaya_jax.inference.scoring import Scorer, scored_batches
from zaya_jax.train.metrics import bits_per_byte


@dataclasses.dataclass(frozen=True)
class Text:
    """A text that is to be scored."""

    name: str
    num_bytes: int
    """In UTF-8, whatever its tokens are: so that networks with other tokenizers can be compared."""
    tokens_N: UInt[np.ndarray, " N"]


@dataclasses.dataclass(frozen=True)
class TextLoss:
    """How much of a text a network did not know before."""

    name: str
    num_bytes: int
    num_tokens: int
    nats: float
    """Cross-entropy, summed over the tokens."""

    def to_json(self) -> dict[str, Any]:
        """The sums, and what is said of them."""
        return {
            **dataclasses.asdict(self),
            "bits_per_byte": bits_per_byte(self.nats, self.num_bytes),
            "nats_per_token": self.nats_per_token,
            "perplexity": self.perplexity,
        }

    @property
    def nats_per_token(self) -> float:
        """The mean cross-entropy of a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Between how many equally likely tokens the network was undecided."""
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf


@dataclasses.dataclass(frozen=True)
class PositionLoss:
    """The loss of tokens that were predicted from about as many tokens."""

    first: int
    """The fewest tokens that a prediction had read, the one that begins the text included."""
    last: int
    """The most."""
    num_tokens: int
    nats: float

    def to_json(self) -> dict[str, Any]:
        """The sums, and their ratio."""
        return dataclasses.asdict(self) | {"nats_per_token": self.nats / self.num_tokens}


@dataclasses.dataclass(frozen=True)
class TextReport:
    """The loss of some texts."""

    texts: tuple[TextLoss, ...]
    positions: tuple[PositionLoss, ...]
    """Between powers of two; those that have no token are left out."""

    @property
    def total(self) -> TextLoss:
        """That of all texts together."""
        sums = (
            sum(getattr(text, name) for text in self.texts) for name in ("num_bytes", "num_tokens", "nats")
        )
        return TextLoss("in all", *sums)

    def to_json(self) -> dict[str, Any]:
        """All of it as plain values."""
        return {
            "files": [text.to_json() for text in self.texts],
            "total": self.total.to_json(),
            "positions": [position.to_json() for position in self.positions],
        }


def read_texts(files: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The names of files with the text in them, as it is: no end of a line is made another.

    Raises:
      ValueError: for a file that is empty or not UTF-8.
    """
    for file in files:
        try:
            text = pathlib.Path(file).read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: byte {error.start} begins no character") from None
        if not text:
            raise ValueError(f"{file} is empty; a text that is evaluated must have a character")
        yield file, text


def encode_texts(texts: Sequence[tuple[str, str]], tokenizer: Tokenizer) -> list[Text]:
    """Texts with their tokens, by name.

    Raises:
      ValueError: for a text of which the tokenizer knows nothing.
    """
    all_tokens = tokenizer.encode_documents(text for _, text in texts)
    found = [
        Text(name, len(text.encode()), tokens_N)
        for (name, text), tokens_N in zip(texts, all_tokens, strict=True)
    ]
    for text in found:
        if not len(text.tokens_N):
            raise ValueError(f"{text.name} has no token; the tokenizer {tokenizer.name} knows nothing of it")
    return found


def evaluate_texts(
    scorer: Scorer, texts: Sequence[Text], *, advance: Callable[[int], None] = lambda _: None
) -> TextReport:
    """The loss of each text and at each position; every token counts once, by as much before it as fits.

    Args:
      scorer: the network.
      texts: each with a token at least.
      advance: is told of each batch how many tokens of texts were in it.
    """
    windows = [
        rolling_requests(text.tokens_N, prefix_id=scorer.prefix_id, length=scorer.length) for text in texts
    ]
    requests = [request for of_text in windows for request in of_text]
    text_of = [number for number, of_text in enumerate(windows) for _ in of_text]
    nats, sums = [0.0] * len(texts), []
    for batch in scored_batches(scorer, requests):
        # Python's floats: in float32 the sum over a long text would lose its last windows.
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
    """The classes of positions that have tokens."""
    return tuple(
        PositionLoss(2**j, min(2 ** (j + 1) - 1, length), int(num), float(nats))
        for j, (nats, num) in enumerate(sums_2J.T)
        if num
    )
