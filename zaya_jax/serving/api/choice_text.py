"""One generated text: what each token adds to it, and whether that is reasoning or content."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.data.chats.templates.template import THINK
from zaya_jax.data.tokenizers.token_spellings import special_token_names
from zaya_jax.inference.engine.sequence import NewToken
from zaya_jax.inference.engine.text_stream import FinishReason, TextWriter
from zaya_jax.serving.api.request import CompletionRequest
from zaya_jax.serving.loaded_model import LoadedModel


@dataclasses.dataclass(frozen=True)
class AddedToken:
    """A token of a text.

    Attributes:
      new: token with its log-probabilities and experts, from the engine.
      text: text that became known with this token. It is empty for a token that is part of a character or may
        begin a stop string. The texts of all tokens together are the whole text.
      offset: number of characters that precede it in the text.
    """

    new: NewToken
    text: str
    offset: int


@dataclasses.dataclass(frozen=True)
class Delta:
    """A new part of a text.

    Attributes:
      index: number of the text in its request.
      content: new characters of the content.
      reasoning: new characters of the reasoning.
      tokens: new tokens.
      finish_reason: why the text ended; None while it continues.
    """

    index: int
    content: str = ""
    reasoning: str = ""
    tokens: tuple[AddedToken, ...] = ()
    finish_reason: FinishReason | None = None


def join(deltas: Sequence[Delta]) -> Delta:
    """Joins successive parts of one text."""
    return Delta(
        deltas[0].index,
        "".join(each.content for each in deltas),
        "".join(each.reasoning for each in deltas),
        tuple(token for each in deltas for token in each.tokens),
        deltas[-1].finish_reason,
    )


class ChoiceText:
    """A text while it is generated.

    Attributes:
      index: number of the text in its request.
      num_tokens: number of tokens so far.
      finish_reason: why the text ended; None while it continues.
    """

    def __init__(self, model: LoadedModel, request: CompletionRequest, index: int):
        """Starts an empty text.

        Args:
          model: model with the tokenizer.
          request: the request.
          index: number of the text in the request.
        """
        # Only chats have reasoning. In a completion, its marks are special tokens like any other.
        chat_format = model.chat_format if request.is_chat else None
        self._think_marks = chat_format.think_marks if chat_format else {}
        special_names = {} if request.skips_specials else special_token_names(model.tokenizer)
        self._writer = TextWriter(
            model.tokenizer,
            limit=request.max_new_tokens[index // request.num_choices],
            eos_id=request.end_ids,
            stop=request.stop,
            marks={**special_names, **self._think_marks},
        )
        self.index = index
        self._is_reasoning = bool(request.reasoning_start)
        # The mark itself is not part of the reasoning that a client sees.
        self._reasoning_start = request.reasoning_start.removeprefix(THINK)
        self._num_characters = 0

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far, including the one that ended the text."""
        return self._writer.num_tokens

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the text ended; None while it continues."""
        return self._writer.finish_reason

    def begin(self) -> Delta:
        """Returns the beginning of the reasoning that the prompt ends with; the model did not generate it."""
        return Delta(self.index, reasoning=self._reasoning_start)

    def add(self, new: NewToken) -> Delta:
        """Adds a token, and returns what it adds to the text."""
        content = reasoning = ""
        for piece in self._writer.add(new.token):
            # The marks switch between reasoning and content, and are part of neither.
            if piece.is_mark and piece.text in self._think_marks.values():
                self._is_reasoning = piece.text == THINK
            elif self._is_reasoning:
                reasoning += piece.text
            else:
                content += piece.text
        token = AddedToken(new, reasoning + content, self._num_characters)
        self._num_characters += len(token.text)
        return Delta(self.index, content, reasoning, (token,), self.finish_reason)
