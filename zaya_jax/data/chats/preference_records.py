"""Reads preferences from records and validates them: two answers to one prompt, `chosen` and `rejected`.

The format is that of TRL and Hugging Face's datasets ([TRL], conversational preference): `chosen` and
`rejected` are whole conversations that start alike, or answers to a separate `prompt`. A prompt is a list of
messages, or text, which becomes a message of the user; an answer likewise becomes one of the assistant.
Other fields, such as scores, are ignored. Pairs of ShareGPT and Alpaca are supported too
(`zaya_jax.data.chats.record_formats`).
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.data.chats.record_formats import RecordFormat, detect_format, pair_of
from zaya_jax.data.chats.records import ASSISTANT, Message, hash_of, parse_messages, read_records
from zaya_jax.data.chats.tool_records import Tool, parse_tools
from zaya_jax.errors import UserError

USER = "user"
SIDES = ("chosen", "rejected")
Messages = tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Preference:
    """Two conversations that start alike, and the location of their record.

    Attributes:
      chosen: messages of the preferred conversation.
      rejected: messages of the other conversation.
      location: location of the record, "FILE:LINE".
      tools: tools that the assistant may call in both conversations.
    """

    chosen: Messages
    rejected: Messages
    location: str
    tools: tuple[Tool, ...] = ()

    @property
    def prompt(self) -> Messages:
        """The messages that both conversations start with."""
        # Not strict: one conversation may be longer than the other.
        pairs = zip(self.chosen, self.rejected, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        return self.chosen[: min(len(self.chosen), len(self.rejected)) if same is None else same]

    @property
    def hash(self) -> int:
        """A hash of prompt and tools, so that all pairs with the same prompt are in the same split."""
        return hash_of(self.prompt, self.tools)


def read_preferences(
    source: str | os.PathLike[str], *, record_format: RecordFormat | None = None
) -> Iterator[Preference]:
    """Yields the pairs of a source, in the order of its files and lines; blank lines are ignored.

    Args:
      source: source of records, as `find_chat_files` accepts it.
      record_format: format of the records; None detects it from the first record.

    Raises:
      UserError: naming file and line, if a record is not a pair.
    """
    for location, record in read_records(source):
        record_format = record_format or detect_format(record, location)
        yield parse_preference(record, record_format, location)


def parse_preference(record: Mapping[str, Any], record_format: RecordFormat, location: str) -> Preference:
    """Parses a record of a pair.

    Raises:
      UserError: if it is not one.
    """
    # All formats are converted to TRL's first, so that one set of checks suffices.
    values = pair_of(record, record_format, location)
    chosen, rejected = (parse_conversation(values, side, location) for side in SIDES)
    pair = Preference(chosen, rejected, location, parse_tools(record.get("tools"), location))
    _check_sides(pair, values)
    return pair


def _check_sides(pair: Preference, values: Mapping[str, Any]) -> None:
    """Checks that both conversations answer the same prompt.

    Raises:
      UserError: if they do not.
    """
    if not pair.prompt:
        # A separate prompt was already prepended, so it is not missing here.
        if "prompt" not in values and pair.chosen[0].role == ASSISTANT:
            raise UserError(
                f'{pair.location} has answers but no prompt; add the "prompt" that they answer, or start '
                "both conversations with it"
            )
        raise UserError(
            f"{pair.location} has conversations that start with different messages; chosen and rejected must "
            "answer the same prompt"
        )
    sides = dict(zip(SIDES, (pair.chosen, pair.rejected), strict=True))
    for side, other in (SIDES, SIDES[::-1]):
        # Two equal conversations are not an error here; building the corpus skips and lists them.
        if sides[side] == pair.prompt != sides[other]:
            raise UserError(
                f"{pair.location} has a {side} that is the start of {other}, so it has no answer; both "
                "must end with an answer to the same prompt"
            )


def parse_conversation(values: Mapping[str, Any], side: str, location: str) -> Messages:
    """Parses the conversation of a side, including the prompt if the record has it separately.

    Raises:
      UserError: if it is no conversation, or no answer follows its prompt.
    """
    answer = _messages(values.get(side), side, location, role=ASSISTANT)
    if "prompt" not in values:
        if isinstance(values[side], str):
            raise UserError(
                f'{location} has a {side} that is text, but no prompt; add the "prompt" that it answers, or '
                "make it a list of messages"
            )
        return answer
    prompt = _messages(values["prompt"], "prompt", location, role=USER)
    if answer == prompt:
        raise UserError(f"{location} has a {side} that is only the prompt; an answer must follow")
    # Some data sets have the prompt separately and also at the start of both conversations.
    if answer[: len(prompt)] == prompt:
        return answer
    if answer[0].role != ASSISTANT:
        raise UserError(
            f"{location} has a {side} that starts with a message of the {answer[0].role}; it must start with "
            "the whole prompt, or with the assistant's answer to it"
        )
    return prompt + answer


def _messages(value: Any, name: str, location: str, *, role: str) -> Messages:
    # Text is validated like a message, because it may contain half a surrogate pair too.
    messages = [{"role": role, "content": value}] if isinstance(value, str) else value
    return parse_messages(messages, location, name)
