"""Prompts and their texts: `generate`'s tokens as characters, with stop strings and log-probabilities."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.inference.generate import Settings, Written, follow, tokens_of_one
from zaya_jax.inference.text import FinishReason, Piece, Writer
from zaya_jax.model.zaya import Zaya

LOOK_EVERY = 32
"""Tokens between two looks for stop strings: what is computed for nothing behind one, at most."""
SHOW_EVERY = 16


@dataclasses.dataclass(frozen=True)
class Completion:
    """What a prompt was continued with.

    Attributes:
      text: without special tokens, and cut before a stop string.
      tokens: all that were taken, with an end token or those that spell a stop string.
      logprobs: of each token the natural logarithm of the probability that the network gave it. It is of
        the network's own distribution, before temperature, `top_k` and `top_p`, as in a pass over the text.
      finish_reason: "stop" for an end token or a stop string, "length" for `max_new_tokens`.
    """

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason


def complete(
    model: Zaya,
    variables: Mapping,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
) -> list[Completion]:
    """Continues prompts, in one batch.

    With a seed for each prompt a text is the same in any batch; with one for all it is of its place there.

    Args:
      model: the network.
      variables: its weights.
      tokenizer: that made the prompts.
      prompts: tokens, of any lengths.
      settings: how tokens are chosen, and how many.
      stop: strings before which a text is cut, also where one spans tokens. Of several that which is
        whole first counts.

    Raises:
      ValueError: as `follow`, and for a stop string without a character.
    """
    limits = settings.limits(len(prompts))
    rows = [_Row(Writer(tokenizer, limit=n, eos_id=settings.eos_id, stop=stop)) for n in limits]
    # Who looks for nothing lets the device go through in one go.
    for written in follow(model, variables, prompts, settings, chunk=LOOK_EVERY if stop else None):
        for number, row in enumerate(rows):
            row.read(written, number)
        if all(row.writer.finish_reason for row in rows):
            break
    return [row.completion() for row in rows]


@dataclasses.dataclass
class _Row:
    """A text of a batch, on the way."""

    writer: Writer
    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()

    def read(self, written: Written, number: int) -> None:
        """Takes the tokens that are new, up to the end of the text."""
        for token in written.tokens_BM[number, self.writer.num_tokens :].tolist():
            if self.writer.finish_reason:
                break
            self.text += "".join(piece.text for piece in self.writer.add(token))
        num_tokens = self.writer.num_tokens
        self.tokens = tuple(written.tokens_BM[number, :num_tokens].tolist())
        self.logprobs = tuple(written.logprobs_BM[number, :num_tokens].tolist())

    def completion(self) -> Completion:
        """The text, which has ended."""
        assert self.writer.finish_reason is not None, "the loop goes on to the limit of each row"
        return Completion(self.text, self.tokens, self.logprobs, self.writer.finish_reason)


def stream_text(
    model: Zaya,
    variables: Mapping,
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
    marks: Mapping[int, str] | None = None,
) -> Iterator[Piece]:
    """Continues one prompt and hands its text out as it comes; together it is `complete`'s.

    Nothing is handed out that may be the beginning of a stop string, until it is known not to be one.

    Args:
      model: the network.
      variables: its weights.
      tokenizer: that made the prompt.
      prompt: its tokens.
      settings: how tokens are chosen, and how many.
      stop: strings before which the text is cut.
      marks: special tokens whose names are handed out, by number, as pieces of their own.

    Raises:
      ValueError: as `complete`, at the call and not at the first piece.
    """
    # First of all what looks at the stop strings: behind it the prompt is read.
    writer = _writer_of(tokenizer, settings, stop, marks)
    return _pieces(writer, tokens_of_one(follow(model, variables, [prompt], settings, chunk=SHOW_EVERY)))


def text_of(
    tokenizer: Tokenizer,
    tokens: Iterator[int],
    settings: Settings,
    *,
    stop: Sequence[str] = (),
    marks: Mapping[int, str] | None = None,
) -> Iterator[Piece]:
    """The text of one prompt's tokens as they come; the other arguments are those of `stream_text`."""
    return _pieces(_writer_of(tokenizer, settings, stop, marks), tokens)


def _writer_of(
    tokenizer: Tokenizer, settings: Settings, stop: Sequence[str], marks: Mapping[int, str] | None
) -> Writer:
    (limit,) = settings.limits(1)
    return Writer(tokenizer, limit=limit, eos_id=settings.eos_id, stop=stop, marks=marks)


def _pieces(writer: Writer, tokens: Iterator[int]) -> Iterator[Piece]:
    for token in tokens:
        yield from writer.add(token)
        if writer.finish_reason:
            return
