"""The messages of a conversation, as the chat template receives them."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.data.chats.records import ASSISTANT, Message
from zaya_jax.data.chats.templates.template import THINK, THINK_END

USER, SYSTEM = "user", "system"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
      system: system message; empty for none.
      turns: messages of user and assistant, alternating.
    """

    system: str = ""
    turns: tuple[Message, ...] = ()

    @property
    def messages(self) -> Sequence[Message]:
        """All messages, the system message first."""
        return (*([Message(SYSTEM, self.system)] if self.system else []), *self.turns)

    def with_question(self, content: str) -> "Conversation":
        """Returns the conversation with the next turn of the user."""
        return dataclasses.replace(self, turns=(*self.turns, Message(USER, content)))

    def with_answer(self, content: str) -> "Conversation":
        """Returns the conversation with the assistant's answer.

        A thought that was interrupted is closed, because templates search for its end.
        """
        # An open thought would make the template treat the next turn as part of it.
        if content.rfind(THINK) > content.rfind(THINK_END):
            content += THINK_END
        return dataclasses.replace(self, turns=(*self.turns, Message(ASSISTANT, content)))

    def without_last_turn(self) -> "Conversation":
        """Returns the conversation without the user's last turn and its answer."""
        return dataclasses.replace(self, turns=self.turns[:-2])

    def without_turns(self) -> "Conversation":
        """Returns the conversation with its system message only."""
        return dataclasses.replace(self, turns=())

    def with_system(self, system: str) -> "Conversation":
        """Returns the conversation with another system message and the same turns."""
        return dataclasses.replace(self, system=system)
