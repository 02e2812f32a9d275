"""The loop of `zaya chat`: reads lines, answers them, and runs commands that begin with a slash."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence

from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.templates.template import THINK
from zaya_jax.data.chats.tool_records import ToolCall
from zaya_jax.errors import UserError
from zaya_jax.fields import did_you_mean
from zaya_jax.inference.chat.messages import Conversation
from zaya_jax.inference.chat.screen import AnswerScreen
from zaya_jax.inference.chat.tool_calls import CallNote, describe_call, message_pieces
from zaya_jax.inference.engine.text_stream import Piece
from zaya_jax.inference.tool_calls.message_parser import ToolParsing

COMMANDS = {
    "/quit": "end the chat",
    "/reset": "remove all turns",
    "/undo": "remove the last turn and its answer",
    "/system TEXT": "set the system message to TEXT, or to nothing",
    "/tool TEXT": "send TEXT as the result of the tool call that waits for one",
    "/help": "list the commands",
}
Answer = Callable[[Sequence[int], int], Iterator[Piece]]
"""Generates the pieces of an answer from the tokens of a conversation. The second argument is the number of
the answer, which changes the random draws."""


@dataclasses.dataclass(frozen=True)
class ChatLoop:
    """A chat at a terminal or through pipes.

    Attributes:
      chat_format: chat format of the model.
      answer: function that generates an answer.
      write: function that displays a part of an answer at once; notes go to standard error.
      is_interactive: whether a person types the lines. An error is then a note, and Ctrl-C interrupts an
        answer; otherwise both end the program.
      is_terminal: whether standard output is a terminal, where thoughts are dim.
      shows_thoughts: whether thoughts are displayed.
      parsing: how calls of tools are parsed; None if the template does not support them.
    """

    chat_format: ChatFormat
    answer: Answer
    write: Callable[[str], object]
    is_interactive: bool
    is_terminal: bool
    shows_thoughts: bool = True
    parsing: ToolParsing | None = None

    def run(self, conversation: Conversation, lines: Iterator[str]) -> Conversation:
        """Answers lines until the last one, or /quit.

        Raises:
          UserError: for a line that cannot be answered, unless the chat is interactive.
          KeyboardInterrupt: unless the chat is interactive.
        """
        for number, line in enumerate(lines):
            if line.strip() == "/quit":
                break
            try:
                conversation = self._handle(conversation, line, number)
            except (UserError, KeyboardInterrupt) as error:
                if not self.is_interactive:
                    raise
                # An interruption has no text; its empty line ends the one with ^C.
                self._note(str(error))
        return conversation

    def _handle(self, conversation: Conversation, line: str, number: int) -> Conversation:
        """Returns the conversation after a line."""
        if line.startswith("/"):
            return self._run_command(conversation, line.strip(), number)
        asked = conversation.with_question(line)
        return self._answer(asked, conversation, number) if line.strip() else conversation

    def _run_command(self, conversation: Conversation, words: str, number: int) -> Conversation:
        command, _, text = words.partition(" ")
        # The key of a command with an argument has the argument's name after it.
        known = [each.split()[0] for each in COMMANDS]
        if command not in known or (text and command not in ("/system", "/tool")):
            # A known command with an argument is not a suggestion for itself.
            others = [each for each in known if each != command]
            hint = did_you_mean(command, others) or f"known are {', '.join(COMMANDS)}"
            raise UserError(
                f'unknown command "{words:.40}"; {hint}; to send it as text, put a space before it'
            )
        if command == "/help":
            self._note("\n".join(f"{each:<14}{what}" for each, what in COMMANDS.items()))
            return conversation
        if command == "/system":
            return conversation.with_system(text.strip())
        if command == "/tool":
            return self._add_result(conversation, text, number)
        changed = conversation.without_last_turn() if command == "/undo" else conversation.without_turns()
        # A question and its answer count as one turn.
        self._note(f"{changed.num_questions} turns are left")
        return changed

    def _add_result(self, conversation: Conversation, text: str, number: int) -> Conversation:
        """Returns the conversation with the result of a call, and the answer once all calls have theirs."""
        if not conversation.pending_calls:
            raise UserError("no tool call waits for a result; /tool follows an answer with a call")
        changed = conversation.with_result(text)
        if changed.pending_calls:
            self._note(f"{describe_call(changed.pending_calls[0])} waits for its result")
            return changed
        return self._answer(changed, conversation, number)

    def _answer(self, asked: Conversation, before: Conversation, number: int) -> Conversation:
        """Returns a conversation with its answer, or the one before it if the answer is empty."""
        tokens = self.chat_format.answer_prompt(asked.messages, tools=asked.tools)
        pieces = self.answer(tokens, number)
        begun = self.chat_format.thought_prefix(asked.messages, tools=asked.tools)
        calls: list[ToolCall] = []
        if self.parsing is not None:
            pieces = message_pieces(pieces, self.parsing, calls, is_reasoning=bool(begun))
        answer = self._show(begun, pieces)
        # An interrupted answer stays part of the conversation: the user has read it.
        if not answer and not calls:
            return before
        if calls:
            self._note("/tool TEXT sends the result of the first call")
        return asked.with_answer(answer, tuple(calls))

    def _show(self, begun: str, pieces: Iterator[Piece]) -> str:
        """Displays an answer as it arrives; returns all of it, or the part before an interruption."""
        # A template may begin the answer with an open thought, which the model then continues.
        screen = AnswerScreen(self.write, is_terminal=self.is_terminal, shows_thoughts=self.shows_thoughts)
        if begun:
            screen.show(Piece(THINK, is_mark=True))
            screen.show(Piece(begun.removeprefix(THINK)))
        answer = ""
        try:
            for piece in pieces:
                screen.show(piece)
                # A description of a call is for the reader; the conversation has the call itself.
                answer += "" if isinstance(piece, CallNote) else piece.text
        except KeyboardInterrupt:
            if not self.is_interactive:
                raise
        finally:
            screen.end()
        # Without a piece there is no answer, even if the template has begun one.
        return begun + answer if answer else ""

    def _note(self, text: str) -> None:
        if self.is_interactive:
            print(text, file=sys.stderr, flush=True)


def typed_lines(*, on_screen: bool) -> Iterator[str]:
    """Yields the lines that a person types, until the end of input; Ctrl-C only clears the line.

    Args:
      on_screen: whether standard output is the terminal too, and may show a prompt.
    """
    while True:
        try:
            # `input` has readline, which writes its prompt to standard output.
            yield input("> ") if on_screen else _read_with_prompt_on_stderr()
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends the chat)", file=sys.stderr, flush=True)
        except EOFError:
            # Ctrl-D leaves the cursor after the prompt.
            print(file=sys.stderr)
            return


def _read_with_prompt_on_stderr() -> str:
    """Reads a line while answers go to a file, which must not contain the prompt."""
    print("> ", end="", file=sys.stderr, flush=True)
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.rstrip("\n")
