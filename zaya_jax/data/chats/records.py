"""Reads chats from records and validates them: `{"messages": [{"role": "user", "content": "..."}, ...]}`.

Other common records, those of ShareGPT and Alpaca, are supported too (`zaya_jax.data.chats.record_formats`).
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from zaya_jax.data.chats.record_formats import RecordFormat, detect_format, messages_of
from zaya_jax.data.sources import parquet
from zaya_jax.data.sources.json_lines import inner_suffix, read_objects
from zaya_jax.errors import UserError
from zaya_jax.files.hub import fetch
from zaya_jax.files.untrusted_folder import describe_special

ASSISTANT = "assistant"
"""The role whose messages a model learns."""
RECORD_PATTERNS = ("*.jsonl*", "*.ndjson*", "*.parquet", "*.arrow")
"""Files of a data set on the Hugging Face hub that may contain records."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a chat.

    Attributes:
      role: role of the speaker: "system", "user", "assistant" or another that the template knows.
      content: text of the message.
      name: name of the speaker, which some templates write; None if there is none.
    """

    role: str
    content: str
    name: str | None = None

    def to_json(self) -> dict[str, str]:
        """Returns the fields that are set, as templates read them."""
        values = {"role": self.role, "content": self.content}
        return values if self.name is None else values | {"name": self.name}


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation and the location of its record.

    Attributes:
      messages: messages in order, at least one.
      location: location of the record, "FILE:LINE".
    """

    messages: tuple[Message, ...]
    location: str

    @property
    def hash(self) -> int:
        """A hash of the messages, independent of the location."""
        return hash_of(self.messages)


def hash_of(messages: Sequence[Message]) -> int:
    """A 64-bit hash of the contents of messages."""
    # Hashes only the values of fields that are set: a chat must have the same split as in older corpora,
    # whose messages had no field for a name.
    content = json.dumps([list(message.to_json().values()) for message in messages])
    return int.from_bytes(hashlib.blake2b(content.encode(), digest_size=8).digest())


def find_chat_files(source: str | os.PathLike[str]) -> list[pathlib.Path]:
    """Finds the files of records of a source, in a folder at any depth.

    Args:
      source: a file; a folder, whose hidden files and folders are ignored; or the id of a data set on the
        Hugging Face hub, which is downloaded.

    Raises:
      UserError: if there are none.
    """
    download = fetch(os.fspath(source), "dataset", patterns=RECORD_PATTERNS)
    root = pathlib.Path(source) if download is None else download.folder
    if root.is_dir():
        # Sorted, because the order of a directory listing differs between file systems.
        files = sorted(path for path in root.rglob("*") if _holds_records(path, root))
    elif root.is_file() or not root.exists():
        files = [root] if root.is_file() else []
    else:
        raise UserError(f"{root} is {describe_special(root.stat().st_mode)}; it must be a file or a folder")
    if not files:
        raise UserError(
            f"no chats found at {root}; it must be a file of JSON Lines, or a folder of *.jsonl (also "
            "compressed), Parquet or Arrow files"
        )
    return files


def _holds_records(path: pathlib.Path, root: pathlib.Path) -> bool:
    """Whether the name of a file in a folder is one of records; a .json usually contains something else."""
    is_hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
    is_table = path.suffix in parquet.SUFFIXES
    return not is_hidden and (is_table or inner_suffix(path.name) in (".jsonl", ".ndjson")) and path.is_file()


def read_chats(
    source: str | os.PathLike[str], *, record_format: RecordFormat | None = None
) -> Iterator[Chat]:
    """Yields the chats of a source, in the order of its files and lines; blank lines are ignored.

    Args:
      source: source of records, as `find_chat_files` accepts it.
      record_format: format of the records; None detects it from the first record.

    Raises:
      UserError: naming file and line, if a record is not a chat.
    """
    for location, values in read_records(source):
        # The first record determines the format of all, so that a later deviation is an error.
        record_format = record_format or detect_format(values, location)
        messages = messages_of(values, record_format, location)
        yield Chat(parse_messages(messages, location, "messages"), location)


def find_format(source: str | os.PathLike[str]) -> tuple[RecordFormat, str]:
    """Detects the format of a source's records, and returns it with the location of the first record.

    Raises:
      UserError: if there is no record, or it has an unknown format.
    """
    for location, values in read_records(source):
        return detect_format(values, location), location
    raise UserError(f"{os.fspath(source)} has no records")


def read_records(source: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the records of a source with their locations, "FILE:LINE"; blank lines are ignored.

    Raises:
      UserError: naming file and line, if a line is not a JSON object.
    """
    for path in find_chat_files(source):
        if path.suffix in parquet.SUFFIXES:
            for number, values in parquet.read_rows(path):
                yield f"{path}:{number}", values
        else:
            for location, _, values in read_objects(path):
                yield location, values


def parse_messages(messages: Any, location: str, name: str) -> tuple[Message, ...]:
    """Parses the messages in a field of a record.

    Args:
      messages: value of the field.
      location: location of the record, for error messages.
      name: name of the field.

    Raises:
      UserError: if the value is not a list of messages, or is empty.
    """
    # An empty list often means that an export failed.
    if messages is None or messages == []:
        raise UserError(f'{location} has no {name}; a non-empty list of messages, "{name}", is required')
    if not isinstance(messages, list):
        raise UserError(
            f"{location} has {_describe_single(messages)} as {name}; it must be a list of messages, "
            f'"{name}": [{_EXAMPLE}]'
        )
    # A chat has one list of messages. Only a pair needs the name of the field to say which list is meant.
    where = location if name == "messages" else f"{location}, {name}"
    locations = (f"{where}, message {i}," for i in range(1, len(messages) + 1))
    return tuple(
        _parse_message(_without_null(each, own), own) for each, own in zip(messages, locations, strict=True)
    )


def _without_null(values: Any, location: str) -> Any:
    """Removes fields that are null: `datasets` adds all fields of any message to every message."""
    if not isinstance(values, dict):
        return values
    if "content" in values and values["content"] is None:
        raise UserError(f"{location} has content that is null; it must be text")
    return {name: value for name, value in values.items() if value is not None}


_EXAMPLE = '{"role": "user", "content": "..."}'


def _describe_single(value: Any) -> str:
    """What a value is instead of a list of messages."""
    if isinstance(value, dict):
        return "one message" if "role" in value or "from" in value else "an object"
    return "text" if isinstance(value, str) else f"a {type(value).__name__}"


def _parse_message(values: Any, location: str) -> Message:
    # Other fields, such as tool_calls, would be dropped silently.
    if not isinstance(values, dict) or values.keys() - {"name"} != {"role", "content"}:
        fields = ", ".join(values) if isinstance(values, dict) else f"a {type(values).__name__}"
        raise UserError(
            f"{location} has {fields or 'nothing'}; a message has role and content, and optionally a name"
        )
    for name, value in values.items():
        # Content may be a list of parts in other APIs, with images; only text is supported.
        if not isinstance(value, str) and not (name == "name" and value is None):
            raise UserError(f"{location} has a {name} that is a {type(value).__name__}; it must be text")
    # The template writes the role between special tokens, so "user<|im_end|>" would forge the end of a turn.
    if not _ROLE.fullmatch(values["role"]):
        raise UserError(
            f'{location} has the role "{values["role"]}"; a role is a word, such as user or assistant'
        )
    # JSON can contain lone surrogates; they have no UTF-8 encoding, which tokenizers require.
    for text in (values["content"], values.get("name") or ""):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{location} has half a surrogate pair at character {error.start}; it must be text"
            ) from error
    return Message(values["role"], values["content"], values.get("name"))
