"""Converts chats to tokens: special tokens come from the template only, and everything that was said is text.

Letters: T time.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.end_tokens import TurnEnds, end_ids_of, find_turn_ends, listed_ends
from zaya_jax.data.chats.templates.jinja_environment import RenderedChat
from zaya_jax.data.chats.templates.rendered_tokens import ChatEncoder
from zaya_jax.data.chats.templates.template import (
    THINK,
    THINK_END,
    TURN_END,
    TURN_START,
    ZAYA,
    ChatInput,
    ChatTemplate,
    load_template,
)
from zaya_jax.data.chats.templates.tool_support import ToolSupport, find_tool_support, uses_tools
from zaya_jax.data.chats.tool_records import Tool
from zaya_jax.data.tokenizers.tokenizer import TOOL_TAGS, Tokenizer
from zaya_jax.errors import UserError

# Marks the end of a message that is continued. transformers uses the same text, so that templates treat it
# the same way.
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


@dataclasses.dataclass(frozen=True)
class EncodedChat:
    """A chat as tokens.

    Attributes:
      tokens_T: token ids, int32.
      learned_T: whether the assistant wrote each token, bool.
      text_bytes: UTF-8 bytes of the rendered text without special tokens.
    """

    tokens_T: np.ndarray
    learned_T: np.ndarray
    text_bytes: int = 0

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """A chat template and a tokenizer, which together convert chats to tokens."""

    template: ChatTemplate
    tokenizer: Tokenizer

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> EncodedChat:
        """Encodes a chat.

        A token is learned if any of its characters is in a `{% generation %}` block, as in transformers'
        `return_assistant_tokens_mask`, or if it directly follows such a block and ends the turn.

        Args:
          messages: messages of the chat, at least one.
          tools: tools that the assistant may call.
          add_generation_prompt: whether the tokens end with the start of the assistant's next turn.
          continue_final_message: whether the tokens end with the last message, which is to be continued.
          variables: variables of the template, by name.

        Raises:
          UserError: as `ChatTemplate.render`; also if the chat has tools, and the template does not support
            them, or if the final message is to be continued and the template does not render it.
        """
        chat = ChatInput(messages, add_generation_prompt, variables or {}, tools)
        return self._encode(self._up_to_message(chat) if continue_final_message else self.render(chat))

    def encode_all(self, chats: Sequence[ChatInput]) -> Iterator[EncodedChat | UserError]:
        """Encodes many chats; later ones are rendered while earlier ones are encoded.

        Yields:
          Each chat as `encode` returns it, or the error if the template cannot render it.
        """
        # Refused chats are not rendered, but keep their place among the results.
        checked = list(map(self._with_tool_support, chats))
        accepted = [chat for chat in checked if isinstance(chat, ChatInput)]
        rendered = self.template.render_all(accepted, trusted=self._variables)
        for chat in checked:
            # After a timeout no further chat follows.
            if (each := chat if isinstance(chat, UserError) else next(rendered, None)) is None:
                return
            yield each if isinstance(each, UserError) else self._encode(each)

    def _encode(self, rendered: RenderedChat) -> EncodedChat:
        tokens = self._encoder.encode(rendered)
        tokens_T, firsts_T, lasts_T = np.array(tokens, np.int32).reshape(-1, 3).T
        learned_T = np.zeros(len(tokens), np.bool_)
        for first, last in rendered.generated:
            # Overlap and not containment: a token may extend beyond the block on either side.
            learned_T |= (firsts_T < last) & (lasts_T > first)
            self._learn_end(tokens_T, learned_T, int(np.searchsorted(firsts_T, last)))
        # Measured on the text itself: the tokenizer may change what it encodes, such as its case or spaces.
        specials = self._encoder.specials_among(tokens, rendered.text)
        names = (rendered.text[each.first : each.last] for each in specials)
        text_bytes = len(rendered.text.encode()) - sum(len(name.encode()) for name in names)
        return EncodedChat(tokens_T, learned_T, text_bytes)

    def _learn_end(self, tokens_T: np.ndarray, learned_T: np.ndarray, place: int) -> None:
        """Marks the token after a block as learned if it ends the turn; otherwise answers would never end."""
        # Finding the turn ends renders sample chats, so it is avoided for blocks that contain their end
        # token.
        if place < len(tokens_T) and int(tokens_T[place]) in self.tokenizer.special_names:
            learned_T[place] |= tokens_T[place] in self.turn_ends.ids

    def text(self, messages: Sequence[Message], *, continue_final_message: bool = False) -> str:
        """Renders a chat as text with the names of special tokens, up to the start of the assistant's next
        turn.

        Args:
          messages: messages of the chat, at least one.
          continue_final_message: whether the text ends with the last message, as in transformers.

        Raises:
          UserError: as `encode`.
        """
        chat = ChatInput(messages, add_generation_prompt=not continue_final_message)
        return (self._up_to_message(chat) if continue_final_message else self.render(chat)).text

    def _up_to_message(self, chat: ChatInput) -> RenderedChat:
        """Renders a chat up to the end of its last message, cut where transformers cuts it."""
        *before, last = chat.messages
        if last.tool_calls:
            raise UserError(
                "the last message has tool calls, which follow its content; it cannot be continued"
            )
        marked = dataclasses.replace(last, content=last.text + _CONTINUE)
        rendered = self.render(dataclasses.replace(chat, messages=[*before, marked]))
        text = rendered.text
        # The last occurrence, because a user may have written the mark.
        end = text.rfind(_CONTINUE.strip())
        if end < 0 or last.text.strip() not in text:
            raise UserError(f"the chat template {self.template.name} does not render the last message")
        if not text.startswith(_CONTINUE, end):  # the template strips messages
            end = len(text[:end].rstrip())
        return rendered.up_to(end)

    def prompt(self, content: str) -> list[int]:
        """Encodes a single user message, up to the start of the assistant's turn."""
        return self.answer_prompt([Message("user", content)])

    def answer_prompt(self, messages: Sequence[Message], *, tools: Sequence[Tool] = ()) -> list[int]:
        """Encodes a conversation, up to the start of the assistant's next turn.

        Args:
          messages: messages of the conversation, at least one.
          tools: tools that the assistant may call.

        Raises:
          UserError: as `encode`.
        """
        return self.encode(messages, tools=tools, add_generation_prompt=True).tokens_T.tolist()

    def thought_prefix(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The start of a thought that the template itself writes before the answer; usually empty."""
        # The generation prompt is the difference of two renderings; templates do not provide it alone.
        before, prompt = (
            self.encode(
                messages, tools=tools, add_generation_prompt=add, variables=variables
            ).tokens_T.tolist()
            for add in (False, True)
        )
        start = prompt[len(before) :] if prompt[: len(before)] == before else []
        if (think := self.specials.get(THINK)) not in start:
            return ""
        # After the last <think>; a template that disables thinking also closes the thought.
        thought = start[len(start) - start[::-1].index(think) :]
        return "" if self.specials.get(THINK_END) in thought else THINK + self.tokenizer.decode(thought)

    @property
    def think_marks(self) -> dict[int, str]:
        """The special tokens around a thought, by id; empty if the tokenizer has none."""
        return {self.specials[name]: name for name in (THINK, THINK_END) if name in self.specials}

    @property
    def think_ids(self) -> tuple[int, int] | None:
        """The special tokens that open and close a thought; None if the tokenizer lacks one of them."""
        if THINK not in self.specials or THINK_END not in self.specials:
            return None
        return self.specials[THINK], self.specials[THINK_END]

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of all special tokens, by name."""
        return self.tokenizer.special_ids

    @property
    def end_id(self) -> int:
        """The token that ends a turn: the first of `end_ids`."""
        return self.end_ids[0]

    @functools.cached_property
    def end_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer; see `zaya_jax.data.chats.templates.end_tokens`."""
        listed = listed_ends(self.tokenizer, self.template.name)
        return end_ids_of(self.tokenizer, turn_ends=self.turn_ends.ids, listed=listed)

    @functools.cached_property
    def turn_ends(self) -> TurnEnds:
        """The special tokens that the template writes after turns."""
        return find_turn_ends(self.template, self._variables, self._encoder)

    @functools.cached_property
    def _encoder(self) -> ChatEncoder:
        return ChatEncoder(self.tokenizer)

    @functools.cached_property
    def _variables(self) -> dict[str, str]:
        names = self.tokenizer.special_names
        ids = {which: getattr(self.tokenizer, f"{which}_id") for which in ("bos", "eos", "pad")}
        # As transformers: templates read names such as `bos_token`, and not ids.
        return {f"{which}_token": names[number] for which, number in ids.items() if number in names}

    @functools.cached_property
    def tool_support(self) -> ToolSupport:
        """What the template does with tools; see `zaya_jax.data.chats.templates.tool_support`."""
        missing = [tag for tag in TOOL_TAGS if tag not in self.specials]
        # Text could spell the tags of our template if they were no special tokens.
        if self.template.is_built_in and missing:
            problem = (
                f'the tokenizer "{self.tokenizer.name}" has no special token {" and ".join(missing)}, which '
                'the template writes; "byte-tools" and `zaya tokenizer train --tools` have them'
            )
            return ToolSupport(dict.fromkeys(("tools", "calls", "results"), problem))
        return find_tool_support(self.template, self._variables)

    def render(self, chat: ChatInput) -> RenderedChat:
        """Renders a chat as text.

        Raises:
          UserError: as `encode`.
        """
        accepted = self._with_tool_support(chat)
        if isinstance(accepted, UserError):
            raise accepted
        return self.template.render(accepted, trusted=self._variables)

    def _with_tool_support(self, chat: ChatInput) -> ChatInput | UserError:
        """The chat as the template supports its tools, or the error if it does not."""
        # Finding the support of tools renders sample chats, so it is avoided for chats without tools.
        if not uses_tools(chat):
            return chat
        return self.tool_support.refusal(chat, self.template.name) or self.tool_support.prepare(chat)


def load_chat_format(template: str | None, tokenizer: Tokenizer) -> ChatFormat:
    """Loads a chat template by name, as `load_template`, and checks it with a tokenizer.

    Raises:
      UserError: as `load_template`; or if the template is invalid, or if a message could forge its turn
        delimiters because they are not special tokens of the tokenizer.
    """
    return checked_format(ChatFormat(load_template(template, tokenizer), tokenizer))


def checked_format(chat_format: ChatFormat) -> ChatFormat:
    """Returns the format after checking that no message can forge its turn delimiters.

    Raises:
      UserError: if the template is invalid or a message could do so.
    """
    tokenizer = chat_format.tokenizer
    # Checked by name, for a clearer message than the general check below.
    missing = {TURN_START, TURN_END} - chat_format.specials.keys()
    if chat_format.template.name == ZAYA and missing:
        raise UserError(
            f'the tokenizer "{tokenizer.name}" has no special token {" and ".join(sorted(missing))}, which '
            f'the chat template "{ZAYA}" writes; "byte-chat" has them'
        )
    if (problem := chat_format.turn_ends.problem) is not None:
        raise UserError(problem)
    return chat_format
