"""Chats as tokens: the template's special tokens as such, all that was said as text.

Letters: T time.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from zaya_jax.data.chat_records import Message
from zaya_jax.data.chat_template import (
    THINK,
    THINK_END,
    TURN_END,
    TURN_START,
    ZAYA,
    ChatTemplate,
    Rendered,
    load_template,
)
from zaya_jax.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer


@dataclasses.dataclass(frozen=True)
class EncodedChat:
    """A chat as tokens.

    Attributes:
      tokens_T: int32.
      learned_T: bool, whether a token is one that the assistant wrote.
    """

    tokens_T: np.ndarray
    learned_T: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens_T)


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """How chats become tokens: a template and a tokenizer."""

    template: ChatTemplate
    tokenizer: Tokenizer

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> EncodedChat:
        """Tokens of a chat.

        A token is learned if any of its characters is of a `{% generation %}` block, as in transformers'
        `return_assistant_tokens_mask`.

        Raises:
          ValueError: as `ChatTemplate.render`.
        """
        rendered = self._render(messages, add_generation_prompt=add_generation_prompt)
        found = list(self._tokens(rendered))
        tokens_T, firsts_T, lasts_T = np.array(found, np.int32).reshape(-1, 3).T
        learned_T = np.zeros(len(found), np.bool_)
        for first, last in rendered.generated:
            learned_T |= (firsts_T < last) & (lasts_T > first)
        return EncodedChat(tokens_T, learned_T)

    def text(self, messages: Sequence[Message], *, goes_on: bool = False) -> str:
        """A chat as text, with the names of special tokens, up to where the assistant's next turn begins.

        Args:
          messages: at least one.
          goes_on: whether the last one is the assistant's, and is to go on: the text then ends with it, as
            with transformers' `continue_final_message`.

        Raises:
          ValueError: as `ChatTemplate.render`, and if the template does not write the last message.
        """
        text = self._render(messages, add_generation_prompt=not goes_on).text
        if not goes_on:
            return text
        last = messages[-1].content
        place = text.rfind(last.strip())
        if place < 0:
            raise ValueError(f"the chat template {self.template.name} does not write the last message")
        # A template may take space away behind what was said.
        end = place + len(last.lstrip())
        return text[:end] if text[place:end] == last.lstrip() else text[: place + len(last.strip())]

    def prompt(self, content: str) -> list[int]:
        """Tokens of a user's turn, up to where the assistant's begins."""
        return self.answer_prompt([Message("user", content)])

    def answer_prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation, up to where the assistant's next turn begins.

        Raises:
          ValueError: as `ChatTemplate.render`.
        """
        return self.encode(messages, add_generation_prompt=True).tokens_T.tolist()

    def begun_thought(self, messages: Sequence[Message]) -> str:
        """What the template writes of a thought before the assistant has said a word; mostly nothing."""
        before, prompt = self.encode(messages).tokens_T.tolist(), self.answer_prompt(messages)
        begun = prompt[len(before) :] if prompt[: len(before)] == before else []
        if (think := self.specials.get(THINK)) not in begun:
            return ""
        begun = begun[len(begun) - begun[::-1].index(think) :]
        return "" if self.specials.get(THINK_END) in begun else THINK + self.tokenizer.decode(begun)

    @property
    def think_marks(self) -> dict[int, str]:
        """The special tokens around a thought, by number; empty in a tokenizer without them."""
        return {self.specials[name]: name for name in (THINK, THINK_END) if name in self.specials}

    @property
    def specials(self) -> Mapping[str, int]:
        """Ids of the special tokens, by name."""
        return self._encoder.specials

    @property
    def end_id(self) -> int:
        """The token that ends a turn."""
        return self.specials.get(TURN_END, self.tokenizer.eos_id)

    @functools.cached_property
    def _encoder(self) -> "_ByteEncoder | _FileEncoder":
        if isinstance(self.tokenizer, ByteTokenizer):
            return _ByteEncoder(self.tokenizer)
        assert isinstance(self.tokenizer, HuggingFaceTokenizer), "there are no others"
        return _FileEncoder(self.tokenizer)

    @functools.cached_property
    def _variables(self) -> dict[str, str]:
        names = {number: name for name, number in self.specials.items()}
        ids = {which: getattr(self.tokenizer, f"{which}_id") for which in ("bos", "eos", "pad")}
        return {f"{which}_token": names[number] for which, number in ids.items() if number in names}

    def _render(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> Rendered:
        return self.template.render(
            messages,
            specials=self.specials,
            variables=self._variables,
            add_generation_prompt=add_generation_prompt,
        )

    def _tokens(self, rendered: Rendered) -> Iterator[tuple[int, int, int]]:
        """Each token with its first character and the one behind its last."""
        begin = 0
        # One piece, unless somebody said the name of a special token: the text around it is then cut there.
        for first, last in (*rendered.said, (len(rendered.text), len(rendered.text))):
            for token, start, end in self._encoder.encode(rendered.text[begin:first]):
                yield token, begin + start, begin + end
            for token in self.tokenizer.encode(rendered.text[first:last]):
                yield token, first, last
            begin = last


def load_chat_format(template: str | None, tokenizer: Tokenizer) -> ChatFormat:
    """Loads a template for a tokenizer, by name as `load_template`.

    Raises:
      ValueError: when there is none, or it writes borders that are no tokens of the tokenizer.
    """
    chat_format = ChatFormat(load_template(template, tokenizer), tokenizer)
    missing = {TURN_START, TURN_END} - chat_format.specials.keys()
    if chat_format.template.name == ZAYA and missing:
        raise ValueError(
            f'the tokenizer "{tokenizer.name}" has no special token {" and ".join(sorted(missing))}, which '
            f'the chat template "{ZAYA}" writes; "byte-chat" has them'
        )
    return chat_format


class _ByteEncoder:
    """Bytes, and special tokens by their names."""

    def __init__(self, tokenizer: ByteTokenizer):
        self.specials = tokenizer.specials
        self._tokenizer = tokenizer
        self._names = re.compile(f"({'|'.join(map(re.escape, self.specials))})")

    def encode(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Each token with its first character and the one behind its last."""
        position = 0
        for piece in self._names.split(text):
            if piece in self.specials:
                yield self.specials[piece], position, position + len(piece)
            else:
                for i, character in enumerate(piece, position):
                    yield from ((token, i, i + 1) for token in self._tokenizer.encode(character))
            position += len(piece)


class _FileEncoder:
    """A tokenizer.json that takes special tokens for what they are, wherever they stand.

    With those that a run's config names: a plain token of the file may be one.
    """

    def __init__(self, tokenizer: HuggingFaceTokenizer):
        self.specials = tokenizer.special_ids
        self._tokenizer = tokenizer

    def encode(self, text: str) -> Iterator[tuple[int, int, int]]:
        """Each token with its first character and the one behind its last."""
        return self._tokenizer.encode_with_places(text)
