"""Chats as JSON lines, read with suspicion: `{"messages": [{"role": "user", "content": "..."}, ...]}`."""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from zaya_jax.json_files import parse_object

ASSISTANT = "assistant"
"""The role that a model learns."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn of a chat.

    Attributes:
      role: who speaks: "system", "user", "assistant" or another that the template knows.
      content: what is said.
    """

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation, and where it was found.

    Attributes:
      messages: in their order, at least one.
      place: "FILE:LINE".
    """

    messages: tuple[Message, ...]
    place: str

    @property
    def hash(self) -> int:
        """Of what is said: the same wherever the chat lies."""
        return hash_of(self.messages)


def hash_of(messages: Sequence[Message]) -> int:
    """Of what is said in some turns, 64 bits."""
    said = json.dumps([dataclasses.astuple(message) for message in messages])
    return int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest())


def find_chat_files(source: str | os.PathLike[str]) -> list[pathlib.Path]:
    """The file of chats that a source is, or all *.jsonl files at any depth of a folder.

    Raises:
      ValueError: when there are none.
    """
    root = pathlib.Path(source)
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*.jsonl") if path.is_file())
    if not files:
        raise ValueError(
            f"there are no chats at {root}; it must be a file of JSON lines, or a folder of *.jsonl"
        )
    return files


def read_chats(source: str | os.PathLike[str]) -> Iterator[Chat]:
    """The chats of a source, in the order of its files and lines; empty lines are passed over.

    Raises:
      ValueError: for a line that is no chat, naming file and line.
    """
    for place, values in read_records(source):
        yield Chat(parse_messages(values.get("messages"), place, "messages"), place)


def read_records(source: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a source and where each stands, "FILE:LINE"; empty lines are passed over.

    Raises:
      ValueError: for a line that is no JSON object, naming file and line.
    """
    for path in find_chat_files(source):
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{path}:{number}"
                    yield place, parse_object(line, place)


def parse_messages(messages: Any, place: str, name: str) -> tuple[Message, ...]:
    """The turns that a field of a record has.

    Args:
      messages: its value.
      place: of the record, which begins the sentence of an error.
      name: of the field.

    Raises:
      ValueError: if it is no list of messages, or an empty one.
    """
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'{place} has no {name}; it must have a list of them, "{name}", with at least one')
    # A record of one list has no second whose message could be meant.
    where = place if name == "messages" else f"{place}, {name}"
    return tuple(_parse_message(each, f"{where}, message {i},") for i, each in enumerate(messages, 1))


def _parse_message(values: Any, place: str) -> Message:
    # Others, such as tool_calls, would be dropped without a word.
    if not isinstance(values, dict) or values.keys() != {"role", "content"}:
        found = ", ".join(values) if isinstance(values, dict) else f"a {type(values).__name__}"
        raise ValueError(
            f"{place} has {found or 'nothing'}; a message has role and content, and nothing else"
        )
    for name, value in values.items():
        if not isinstance(value, str):
            raise ValueError(f"{place} has a {name} that is a {type(value).__name__}; it must be text")
    # The template writes it between tokens: "user<|im_end|>" would be a border.
    if not _ROLE.fullmatch(values["role"]):
        raise ValueError(
            f'{place} has the role "{values["role"]}"; a role is a word, such as user or assistant'
        )
    try:
        values["content"].encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} has half a surrogate pair at character {error.start}; it must be text"
        ) from error
    return Message(values["role"], values["content"])
