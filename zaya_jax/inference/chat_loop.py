"""The loop of `zaya chat`: lines of a user, answers to them, and commands that begin with a slash."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence

from zaya_jax.data.chat_format import ChatFormat
from zaya_jax.data.chat_template import THINK
from zaya_jax.fields import did_you_mean
from zaya_jax.inference.chat_screen import AnswerScreen
from zaya_jax.inference.conversation import Conversation
from zaya_jax.inference.text import Piece

COMMANDS = {
    "/quit": "end",
    "/reset": "forget all turns",
    "/undo": "forget the last turn and its answer",
    "/system TEXT": "tell the assistant TEXT before all turns; without it nothing",
    "/help": "list these",
}
Answer = Callable[[Sequence[int], int], Iterator[Piece]]
"""The pieces of an answer to the tokens of a conversation, and its number: each answer draws anew."""


@dataclasses.dataclass(frozen=True)
class ChatLoop:
    """Who talks, and how.

    Attributes:
      chat_format: how a conversation becomes tokens.
      answer: what the network says to them.
      write: shows a part of an answer at once; notes go to standard error.
      is_person: whether somebody sits there, who can mend a mistake and interrupt an answer. Else a
        mistake, and Ctrl-C, end the program.
      is_terminal: whether thoughts can be dim.
      shows_thoughts: whether they are shown at all.
    """

    chat_format: ChatFormat
    answer: Answer
    write: Callable[[str], object]
    is_person: bool
    is_terminal: bool
    shows_thoughts: bool = True

    def run(self, conversation: Conversation, lines: Iterator[str]) -> Conversation:
        """Answers lines until there are no more, or one says so.

        Raises:
          ValueError: for what cannot be answered, unless a person is told of it.
          KeyboardInterrupt: unless a person is there to go on.
        """
        for number, line in enumerate(lines):
            if line.strip() == "/quit":
                break
            try:
                conversation = self._take(conversation, line, number)
            except (ValueError, KeyboardInterrupt) as error:
                if not self.is_person:
                    raise
                self._note(str(error))
        return conversation

    def _take(self, conversation: Conversation, line: str, number: int) -> Conversation:
        """The conversation behind a line."""
        if line.startswith("/"):
            return self._obey(conversation, line.strip())
        return self._reply(conversation, line, number) if line.strip() else conversation

    def _obey(self, conversation: Conversation, words: str) -> Conversation:
        command, _, text = words.partition(" ")
        known = [each.split()[0] for each in COMMANDS]
        if command not in known or (text and command != "/system"):
            others = [each for each in known if each != command]
            hint = did_you_mean(command, others) or f"known are {', '.join(COMMANDS)}"
            raise ValueError(f'there is no command "{words:.40}"; {hint}; to say it, put a space before it')
        if command == "/help":
            self._note("\n".join(f"{each:<14}{what}" for each, what in COMMANDS.items()))
            return conversation
        if command == "/system":
            return conversation.told(text.strip())
        changed = conversation.undone() if command == "/undo" else conversation.begun_anew()
        self._note(f"{len(changed.turns) // 2} turns are left")
        return changed

    def _reply(self, conversation: Conversation, question: str, number: int) -> Conversation:
        """The conversation with a question and its answer."""
        asked = conversation.asked(question)
        pieces = self.answer(self.chat_format.answer_prompt(asked.messages), number)
        said = self._show(self.chat_format.begun_thought(asked.messages), pieces)
        # What was said before an interruption is part of the conversation: the user has read it.
        return asked.answered(said) if said else conversation

    def _show(self, begun: str, pieces: Iterator[Piece]) -> str:
        """Shows an answer as it comes, and gives all of it, or what was there when it was interrupted."""
        screen = AnswerScreen(self.write, is_terminal=self.is_terminal, shows_thoughts=self.shows_thoughts)
        if begun:
            screen.show(Piece(THINK, is_mark=True))
            screen.show(Piece(begun.removeprefix(THINK)))
        said = ""
        try:
            for piece in pieces:
                screen.show(piece)
                said += piece.text
        except KeyboardInterrupt:
            if not self.is_person:
                raise
        finally:
            screen.end()
        return begun + said if said else ""

    def _note(self, text: str) -> None:
        if self.is_person:
            print(text, file=sys.stderr, flush=True)


def typed_lines(*, on_screen: bool) -> Iterator[str]:
    """Lines that a person types, until the end of input; Ctrl-C only empties the line.

    Args:
      on_screen: whether standard output is the terminal too, and may have a prompt.
    """
    ask = _ask_on_screen if on_screen else _ask_aside
    while True:
        try:
            yield ask()
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends)", file=sys.stderr, flush=True)
        except EOFError:
            print(file=sys.stderr)
            return


def _ask_on_screen() -> str:
    return input("> ")


def _ask_aside() -> str:
    """Where answers go to a file: the prompt must not."""
    print("> ", end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.rstrip("\n")
