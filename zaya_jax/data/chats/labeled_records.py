"""Reads single answers that are marked as desirable or not, and pairs of answers as two of them.

The format is that of [TRL] (unpaired preference): `prompt`, `completion` and a boolean `label`; prompt and
completion are lists of messages or text. A pair, with `chosen` and `rejected`, is split into a desirable and
an undesirable answer.
"""

import dataclasses
import os
from collections.abc import Iterable, Iterator
from typing import Any

from zaya_jax.data.chats.preference_records import (
    SIDES,
    USER,
    Messages,
    parse_conversation,
    parse_preference,
)
from zaya_jax.data.chats.record_formats import RecordFormat, detect_format
from zaya_jax.data.chats.records import ASSISTANT, hash_of, parse_messages, read_records
from zaya_jax.data.chats.tool_records import Tool, parse_tools
from zaya_jax.errors import UserError


@dataclasses.dataclass(frozen=True)
class LabeledAnswer:
    """An answer to a prompt, and whether it is desirable.

    Attributes:
      prompt: messages before the answer.
      answer: messages of the answer.
      is_desirable: whether the network should prefer such answers.
      location: location of the record, "FILE:LINE".
      tools: tools that the assistant may call.
    """

    prompt: Messages
    answer: Messages
    is_desirable: bool
    location: str
    tools: tuple[Tool, ...] = ()

    @property
    def hash(self) -> int:
        """A hash of prompt and tools, so that all answers to the same prompt are in the same split."""
        return hash_of(self.prompt, self.tools)


def read_labeled_answers(
    source: str | os.PathLike[str], *, record_format: RecordFormat | None = None
) -> Iterator[LabeledAnswer]:
    """Yields the answers of a source, in the order of its files and lines; blank lines are ignored.

    Args:
      source: source of records, as `find_chat_files` accepts it.
      record_format: format of pairs; None detects it from the first record.

    Raises:
      UserError: naming file and line, if a record is neither a labeled answer nor a pair.
    """
    for location, record in read_records(source):
        if record.get("label") is not None or record.get("completion") is not None:
            yield _labeled(record, location)
            continue
        # Record by record, because a source may mix pairs and votes.
        record_format = record_format or detect_format(record, location)
        pair = parse_preference(record, record_format, location)
        for side, is_desirable in zip(SIDES, (True, False), strict=True):
            answer = getattr(pair, side)[len(pair.prompt) :]
            if not answer:
                raise UserError(f"{location} has a {side} that is only the prompt; an answer must follow")
            yield LabeledAnswer(pair.prompt, answer, is_desirable, location, pair.tools)


def _labeled(record: dict[str, Any], location: str) -> LabeledAnswer:
    label = record.get("label")
    # TRL's data sets have true and false; 1 or "yes" would be guesses.
    if not isinstance(label, bool):
        raise UserError(f"{location} has the label {label!r:.40}; it must be true (desirable) or false")
    # null counts as absent: `datasets` adds all fields of any record to every record.
    values = {name: value for name, value in record.items() if value is not None}
    if "prompt" not in values:
        raise UserError(f'{location} has no prompt; add the "prompt" that the completion answers')
    prompt = values["prompt"]
    messages = [{"role": USER, "content": prompt}] if isinstance(prompt, str) else prompt
    parsed = parse_messages(messages, location, "prompt")
    whole = parse_conversation(values, "completion", location)
    if whole[len(parsed)].role != ASSISTANT:
        raise UserError(f"{location} has a completion that does not start with the assistant's answer")
    tools = parse_tools(record.get("tools"), location)
    return LabeledAnswer(parsed, whole[len(parsed) :], label, location, tools)


class _Rotation:
    """Chooses, for each answer, one to another prompt: the previous one of the same kind.

    So the chosen answers are those of all prompts, once each, as in [TRL], which rotates a batch by one.
    """

    def __init__(self) -> None:
        self._latest: LabeledAnswer | None = None
        self._other: LabeledAnswer | None = None

    def choose(self, answer: LabeledAnswer) -> LabeledAnswer | None:
        """Returns the latest answer to another prompt; None if there is none yet."""
        # Several answers to one prompt often follow each other; then the one before them serves.
        known = (self._latest, self._other)
        return next((each for each in known if each is not None and each.prompt != answer.prompt), None)

    def append(self, answer: LabeledAnswer) -> None:
        """Adds an answer that later ones may be paired with."""
        if self._latest is not None and self._latest.prompt != answer.prompt:
            self._other = self._latest
        self._latest = answer


def with_other_answers(
    answers: Iterable[LabeledAnswer], *, validation_percent: int
) -> Iterator[tuple[LabeledAnswer, LabeledAnswer]]:
    """Yields each answer with one to another prompt, which estimates the divergence of [KTO].

    Both are of one label and, as far as there are several, of one split.

    Args:
      answers: all answers of a source.
      validation_percent: share of held-out prompts in percent.

    Raises:
      UserError: if all answers have the same prompt.
    """
    rotations: dict[tuple[bool, bool], _Rotation] = {}
    everything, waiting = _Rotation(), []
    for answer in answers:
        # By split too, as far as it is known here: held-out answers should not influence training.
        key = answer.is_desirable, answer.hash % 100 < validation_percent
        rotation = rotations.setdefault(key, _Rotation())
        other = rotation.choose(answer)
        rotation.append(answer)
        everything.append(answer)
        if other is None:
            waiting.append((answer, rotation))
        else:
            yield answer, other
    # The first ones of a kind are paired with the last ones: only a few wait, and the source may be long.
    for answer, rotation in waiting:
        other = rotation.choose(answer) or everything.choose(answer)
        if other is None:
            raise UserError(
                "all answers have the same prompt; at least two different prompts are required, because the "
                "loss compares answers with those to other prompts"
            )
        yield answer, other
