"""The messages of a conversation, as the chat template receives them."""

import dataclasses
from collections.abc import Sequence

from zaya_jax.data.chats.records import ASSISTANT, TOOL, Message
from zaya_jax.data.chats.templates.template import THINK, THINK_END
from zaya_jax.data.chats.tool_records import Tool, ToolCall

USER, SYSTEM = "user", "system"


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation.

    Attributes:
      system: system message; empty for none.
      turns: messages of the user and the assistant, and results of tools.
      tools: tools that the assistant may call.
    """

    system: str = ""
    turns: tuple[Message, ...] = ()
    tools: tuple[Tool, ...] = ()

    @property
    def messages(self) -> Sequence[Message]:
        """All messages, the system message first."""
        return (*([Message(SYSTEM, self.system)] if self.system else []), *self.turns)

    def with_question(self, content: str) -> "Conversation":
        """Returns the conversation with the next turn of the user."""
        return dataclasses.replace(self, turns=(*self.turns, Message(USER, content)))

    @property
    def num_questions(self) -> int:
        """Number of turns of the user."""
        return sum(message.role == USER for message in self.turns)

    @property
    def pending_calls(self) -> tuple[ToolCall, ...]:
        """The calls at the end of the conversation that have no result yet."""
        for num_results, message in enumerate(reversed(self.turns)):
            if message.role != TOOL:
                return message.tool_calls[num_results:]
        return ()

    def with_result(self, content: str) -> "Conversation":
        """Returns the conversation with the result of the first pending call."""
        # Results follow in the order of their calls, as templates expect.
        call = self.pending_calls[0]
        result = Message(TOOL, content, name=call.name, tool_call_id=call.id)
        return dataclasses.replace(self, turns=(*self.turns, result))

    def with_answer(self, content: str, calls: tuple[ToolCall, ...] = ()) -> "Conversation":
        """Returns the conversation with the assistant's answer, and its calls of tools.

        A thought that was interrupted is closed, because templates search for its end.
        """
        # An open thought would make the template treat the next turn as part of it.
        if content.rfind(THINK) > content.rfind(THINK_END):
            content += THINK_END
        answer = Message(ASSISTANT, content if content or not calls else None, tool_calls=calls)
        return dataclasses.replace(self, turns=(*self.turns, answer))

    def without_last_turn(self) -> "Conversation":
        """Returns the conversation without the user's last turn and everything that follows it."""
        last = max((i for i, message in enumerate(self.turns) if message.role == USER), default=0)
        return dataclasses.replace(self, turns=self.turns[:last])

    def without_turns(self) -> "Conversation":
        """Returns the conversation with its system message only."""
        return dataclasses.replace(self, turns=())

    def with_system(self, system: str) -> "Conversation":
        """Returns the conversation with another system message and the same turns."""
        return dataclasses.replace(self, system=system)
