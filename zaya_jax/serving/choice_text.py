"""One text of an answer as its tokens come: what each adds, and whether that is a thought."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.data.chat_template import THINK
from zaya_jax.inference.engine import NewToken
from zaya_jax.inference.text import FinishReason, Writer
from zaya_jax.serving.asked import AskedTexts
from zaya_jax.serving.served import ServedRun


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token of a text.

    Attributes:
      new: as the engine gave it.
      text: that it made known: nothing for a part of a character, or what may be the beginning of a stop
        string. All of them together are the text.
      offset: characters of the text before it.
    """

    new: NewToken
    text: str
    offset: int


@dataclasses.dataclass(frozen=True)
class Delta:
    """What is new of a text.

    Attributes:
      index: of the text in its request.
      content: characters of the answer.
      thought: characters between the marks of a thought.
      tokens: that were added.
      finish_reason: None while the text goes on.
    """

    index: int
    content: str = ""
    thought: str = ""
    tokens: tuple[AddedToken, ...] = ()
    finish_reason: FinishReason | None = None


def join(deltas: Sequence[Delta]) -> Delta:
    """All of a text from its parts, in their order."""
    return Delta(
        deltas[0].index,
        "".join(each.content for each in deltas),
        "".join(each.thought for each in deltas),
        tuple(token for each in deltas for token in each.tokens),
        deltas[-1].finish_reason,
    )


class ChoiceText:
    """A text that is being written.

    Attributes:
      index: of the text in its request.
      num_tokens: that came.
      finish_reason: None while it goes on.
    """

    def __init__(self, served: ServedRun, asked: AskedTexts, index: int):
        """Begins a text.

        Args:
          served: whose tokenizer reads it.
          asked: the request.
          index: of the text in it.
        """
        # A text of no chat has no thoughts: there the marks are special tokens as any other.
        marks = served.chat_format.think_marks if asked.is_chat and served.chat_format else None
        self._writer = Writer(
            served.tokenizer,
            limit=asked.max_new_tokens[index // asked.num_choices],
            eos_id=asked.end_id,
            stop=asked.stop,
            marks=marks,
        )
        self.index = index
        self._is_thought = bool(asked.begun_thought)
        self._begun = asked.begun_thought.removeprefix(THINK)
        self._num_characters = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that came, with that which ended it."""
        return self._writer.num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why it has ended; None while it goes on."""
        return self._writer.finish_reason

    def begin(self) -> Delta:
        """What the template has written of a thought; the answer would not be whole without it."""
        return Delta(self.index, thought=self._begun)

    def add(self, new: NewToken) -> Delta:
        """What a token adds to the text."""
        content = thought = ""
        for piece in self._writer.add(new.token):
            if piece.is_mark:
                self._is_thought = piece.text == THINK
            elif self._is_thought:
                thought += piece.text
            else:
                content += piece.text
        token = AddedToken(new, thought + content, self._num_characters)
        self._num_characters += len(token.text)
        return Delta(self.index, content, thought, (token,), self.finish_reason)
