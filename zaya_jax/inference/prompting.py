"""Turns texts and chats of a user into prompt tokens."""

import argparse
import dataclasses
import functools
from collections.abc import Sequence

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.encoding import ChatFormat
from zaya_jax.data.chats.templates.end_tokens import text_end_ids
from zaya_jax.data.chats.tool_records import Tool
from zaya_jax.inference.loading import LoadedRun, load_for_generation, require_chats, show_progress
from zaya_jax.options import Parser


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt.

    Attributes:
      tokens: token ids.
      end_ids: tokens each of which ends the continuation.
      think_ids: tokens that open and close a thought before the answer; None without thoughts.
    """

    tokens: Sequence[int]
    end_ids: tuple[int, ...]
    think_ids: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class Prompting:
    """How prompts become tokens.

    Attributes:
      run: run that continues the prompts.
      chat: whether a text is a user's turn, rather than a text to continue.
      template: chat template; None for that of the run.
      letters: whether the name of a special token in a text is plain text.
    """

    run: LoadedRun
    chat: bool = False
    template: str | None = None
    letters: bool = False

    @functools.cached_property
    def _chat_format(self) -> ChatFormat:
        return self.run.chat_format(self.template)

    def of_text(self, text: str) -> Prompt:
        """Encodes a text, or with `chat` a user's turn.

        Raises:
          UserError: if the template rejects the turn.
        """
        if self.chat:
            return self.of_messages([Message("user", text)])
        tokenizer = self.run.tokenizer
        # Training texts begin with the BOS token where the tokenizer has one: so must prompts.
        tokens = tokenizer.delimiters.begin(tokenizer.encode(text, specials=not self.letters))
        return Prompt(tokens, text_end_ids(tokenizer))

    def of_messages(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Encodes a conversation that the assistant is to continue.

        Args:
          messages: messages of the conversation, at least one.
          tools: tools that the assistant may call.

        Raises:
          UserError: if the template rejects the conversation, or does not support tools.
        """
        chat_format = self._chat_format
        tokens = chat_format.answer_prompt(messages, tools=tools)
        return Prompt(tokens, chat_format.end_ids, chat_format.think_ids)


def add_prompt_options(parser: Parser, *, prompt: str, chat: str) -> None:
    """Adds the run and the options of a prompt.

    Args:
      parser: parser of the command.
      prompt: help of `--prompt`.
      chat: help of `--chat`.
    """
    parser.add_run_options()
    parser.add_argument("--prompt", default="", help=prompt)
    parser.add_argument("--chat", action="store_true", help=chat)
    parser.add_argument("--template", help='with --chat: "zaya" or a Jinja file (default: that of the run)')
    parser.add_argument(
        "--letters", action="store_true", help="read the name of a special token in the prompt as plain text"
    )


def load_prompting(options: argparse.Namespace) -> Prompting:
    """Loads the run that `add_prompt_options` names.

    Raises:
      UserError: for a run that cannot be loaded, or a chat with one that has no chat template.
    """
    # Reading the weights can take minutes: check the template first.
    if options.chat:
        require_chats(options.run_folder, options.template)
    show_progress(f"loading {options.run_folder}")
    run = load_for_generation(options.run_folder, options.weights)
    return Prompting(run, chat=options.chat, template=options.template, letters=options.letters)
