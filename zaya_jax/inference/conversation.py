"""A conversation as the template gets it: what each command makes of its messages."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.data.chat_records import ASSISTANT, Message
from zaya_jax.data.chat_template import THINK, THINK_END

USER, SYSTEM = "user", "system"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """What was said so far.

    Attributes:
      system: what the assistant is told before all turns; empty for nothing.
      turns: of user and assistant, by turns.
    """

    system: str = ""
    turns: tuple[Message, ...] = ()

    @property
    def messages(self) -> Sequence[Message]:
        """All of it, as the template gets it."""
        return (*([Message(SYSTEM, self.system)] if self.system else []), *self.turns)

    def asked(self, content: str) -> "Conversation":
        """With what the user says next."""
        return dataclasses.replace(self, turns=(*self.turns, Message(USER, content)))

    def answered(self, content: str) -> "Conversation":
        """With the assistant's answer. A thought that was cut short is closed: templates look for its end."""
        if content.rfind(THINK) > content.rfind(THINK_END):
            content += THINK_END
        return dataclasses.replace(self, turns=(*self.turns, Message(ASSISTANT, content)))

    def undone(self) -> "Conversation":
        """Without the user's last turn and its answer."""
        return dataclasses.replace(self, turns=self.turns[:-2])

    def begun_anew(self) -> "Conversation":
        """Without all turns; what the system says stays."""
        return dataclasses.replace(self, turns=())

    def told(self, system: str) -> "Conversation":
        """With another word of the system; the turns stay."""
        return dataclasses.replace(self, system=system)
