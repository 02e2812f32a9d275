"""Preferences as JSON lines, read with suspicion: two answers to one prompt, `chosen` and `rejected`.

As TRL and Hugging Face's datasets have them ([TRL], conversational preference): `chosen` and `rejected` are
whole conversations that begin alike, or answers to a `prompt` beside them. A prompt is a list of messages, or
text, which the user says; an answer likewise, which the assistant says. Other fields, such as scores, are
left alone.
"""

import dataclasses
import os
from collections.abc import Iterator, Mapping
from typing import Any

from zaya_jax.data.chat_records import ASSISTANT, Message, hash_of, parse_messages, read_records

USER = "user"
SIDES = ("chosen", "rejected")
Messages = tuple[Message, ...]


@dataclasses.dataclass(frozen=True)
class Preference:
    """Two conversations that begin alike, and where they were found.

    Attributes:
      chosen: the one that is preferred, in its messages.
      rejected: the other.
      place: "FILE:LINE".
    """

    chosen: Messages
    rejected: Messages
    place: str

    @property
    def prompt(self) -> Messages:
        """The messages that both begin with."""
        pairs = zip(self.chosen, self.rejected, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        return self.chosen[: min(len(self.chosen), len(self.rejected)) if same is None else same]

    @property
    def hash(self) -> int:
        """Of the prompt, so that all pairs of one prompt are on the same side of a split."""
        return hash_of(self.prompt)


def read_preferences(source: str | os.PathLike[str]) -> Iterator[Preference]:
    """The pairs of a source, in the order of its files and lines; empty lines are passed over.

    Raises:
      ValueError: for a line that is no pair, naming file and line.
    """
    for place, values in read_records(source):
        chosen, rejected = (_conversation(values, side, place) for side in SIDES)
        pair = Preference(chosen, rejected, place)
        if not pair.prompt:
            raise ValueError(
                f"{place} has sides that begin with different messages; chosen and rejected must answer the "
                "same prompt"
            )
        yield pair


def _conversation(values: Mapping[str, Any], side: str, place: str) -> Messages:
    """A side with the prompt before it, whether or not the record has it there."""
    answer = _messages(values.get(side), side, place, role=ASSISTANT)
    if "prompt" not in values:
        if isinstance(values[side], str):
            raise ValueError(
                f'{place} has a {side} that is text, and no prompt; it must have a "prompt" that it answers, '
                "or be a list of messages"
            )
        return answer
    prompt = _messages(values["prompt"], "prompt", place, role=USER)
    if answer[: len(prompt)] == prompt:
        return answer
    if answer[0].role != ASSISTANT:
        raise ValueError(
            f"{place} has a {side} that begins with a message of the {answer[0].role}; it must begin with "
            "the whole prompt, or with the assistant's answer to it"
        )
    return prompt + answer


def _messages(value: Any, name: str, place: str, *, role: str) -> Messages:
    # Through the same rules as a list: text may have half a character too.
    given = [{"role": role, "content": value}] if isinstance(value, str) else value
    return parse_messages(given, place, name)
