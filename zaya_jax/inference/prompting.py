"""Texts and chats of a user as the tokens that a run continues."""

import dataclasses
import functools
from collections.abc import Sequence

from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.chat_records import Message
from zaya_jax.inference.loading import LoadedRun


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What is continued.

    Attributes:
      tokens: of the prompt.
      end_id: the token that ends what follows: of a text or of a turn.
    """

    tokens: Sequence[int]
    end_id: int


@dataclasses.dataclass(frozen=True)
class Prompting:
    """How prompts become tokens.

    Attributes:
      run: that continues them.
      chat: whether a text is the turn of a user, and not to be continued as it is.
      template: of chats; None for the run's own.
      letters: whether a special token's name in a text is plain letters.
    """

    run: LoadedRun
    chat: bool = False
    template: str | None = None
    letters: bool = False

    @functools.cached_property
    def _chat_format(self) -> ChatFormat:
        return self.run.chat_format(self.template)

    def of_text(self, text: str) -> Prompt:
        """A text, or with `chat` a user's turn.

        Raises:
          ValueError: for a turn that the template cannot write.
        """
        if self.chat:
            return self.of_messages([Message("user", text)])
        tokenizer = self.run.tokenizer
        tokens = tokenizer.borders.begin(tokenizer.encode(text, specials=not self.letters))
        return Prompt(tokens, tokenizer.eos_id)

    def of_messages(self, messages: Sequence[Message]) -> Prompt:
        """A conversation that the assistant is to go on with.

        Raises:
          ValueError: for one that the template cannot write.
        """
        return Prompt(self._chat_format.answer_prompt(messages), self._chat_format.end_id)
