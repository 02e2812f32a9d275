"""Reads chats from records and validates them: `{"messages": [{"role": "user", "content": "..."}, ...]}`.

A record may have `tools`, and its messages tool calls and their results (`zaya_jax.data.chats.tool_records`).
Other common records, those of ShareGPT and Alpaca, are supported too (`zaya_jax.data.chats.record_formats`).
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.record_formats import RecordFormat, detect_format, messages_of
from zaya_jax.data.chats.tool_records import Tool, ToolCall, parse_tool_calls, parse_tools
from zaya_jax.data.sources import parquet
from zaya_jax.data.sources.json_lines import inner_suffix, read_objects
from zaya_jax.errors import UserError
from zaya_jax.files.hub import fetch
from zaya_jax.files.untrusted_folder import describe_special

ASSISTANT = "assistant"
"""The role whose messages a model learns."""
TOOL = "tool"
"""The role of messages with the result of a tool call."""
RECORD_PATTERNS = ("*.jsonl*", "*.ndjson*", "*.parquet", "*.arrow")
"""Files of a data set on the Hugging Face hub that may contain records."""
_ROLE = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")
_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}
# Fields that only messages of one role have.
_FIELD_ROLES = {"tool_calls": ASSISTANT, "tool_call_id": TOOL}


@dataclasses.dataclass(frozen=True)
class Message:
    """One message of a chat.

    Attributes:
      role: role of the speaker: "system", "user", "assistant", "tool" or another that the template knows.
      content: text of the message; None for a message that consists of tool calls only.
      name: name of the speaker, which some templates write; None if there is none.
      tool_calls: calls of tools that follow the content; only the assistant has them.
      tool_call_id: id of the call whose result the message is; only a tool has it.
    """

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """The content; empty text if there is none."""
        return self.content or ""

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that are set, as templates read them."""
        calls = [call.to_json() for call in self.tool_calls] or None
        others = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id}
        present = {name: value for name, value in others.items() if value is not None}
        return {"role": self.role, "content": self.content} | present


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation and the location of its record.

    Attributes:
      messages: messages in order, at least one.
      location: location of the record, "FILE:LINE".
      tools: tools that the assistant may call.
    """

    messages: tuple[Message, ...]
    location: str
    tools: tuple[Tool, ...] = ()

    @property
    def hash(self) -> int:
        """A hash of messages and tools, independent of the location."""
        return hash_of(self.messages, self.tools)


def hash_of(messages: Sequence[Message], tools: Sequence[Tool] = ()) -> int:
    """A 64-bit hash of the contents of messages, and of their tools if there are any."""
    # Hashes only the values of fields that are set: a chat must have the same split as in older corpora,
    # whose messages had no field for a name, and whose chats had no tools.
    values: list[Any] = [list(message.to_json().values()) for message in messages]
    content = json.dumps([values, *tools] if tools else values)
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
        tools = parse_tools(values.get("tools"), location)
        yield Chat(parse_messages(messages, location, "messages"), location, tools)


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
    return tuple(parse_message(each, own) for each, own in zip(messages, locations, strict=True))


_EXAMPLE = '{"role": "user", "content": "..."}'


def _describe_single(value: Any) -> str:
    """What a value is instead of a list of messages."""
    if isinstance(value, dict):
        return "one message" if "role" in value or "from" in value else "an object"
    return "text" if isinstance(value, str) else f"a {type(value).__name__}"


def parse_message(values: Any, location: str, *, drops_nulls: bool = True) -> Message:
    """Parses one message.

    Args:
      values: the message. Fields that are null count as missing: `datasets` adds all fields of any message to
        every message.
      location: location of the message, for error messages.
      drops_nulls: whether arguments of tool calls that are null are removed, unless they are JSON text.

    Raises:
      UserError: if the value is not a message.
    """
    fields = _present_fields(values, location)
    for name, value in fields.items():
        # Content may be a list of parts in other APIs, with images; only text is supported.
        if name != "tool_calls" and not isinstance(value, str):
            raise UserError(f"{location} has a {name} that is a {type(value).__name__}; it must be text")
    # The template writes the role between special tokens, so "user<|im_end|>" would forge the end of a turn.
    if not _ROLE.fullmatch(fields["role"]):
        raise UserError(
            f'{location} has the role "{fields["role"]}"; a role is a word, such as user or assistant'
        )
    _check_roles(fields, location)
    _check_surrogates(fields, location)
    # Last: its errors are about the calls, and not the message.
    calls = parse_tool_calls(fields.get("tool_calls", []), location, drops_nulls=drops_nulls)
    others = {name: fields.get(name) for name in ("name", "tool_call_id")}
    return Message(fields["role"], fields.get("content"), tool_calls=calls, **others)


def _present_fields(values: Any, location: str) -> dict[str, Any]:
    """The fields of a message that are set."""
    present = values.items() if isinstance(values, dict) else ()
    # An empty list of calls means that there are none.
    fields = {name: each for name, each in present if each is not None and (name, each) != ("tool_calls", [])}
    # A message of calls needs no content.
    required = {"role"} if "tool_calls" in fields else {"role", "content"}
    if "role" in fields and "content" in required - fields.keys() and "content" in values:
        raise UserError(f"{location} has content that is null; it must be text")
    # Other fields, such as function_call, would be dropped silently.
    if not required <= fields.keys() <= _FIELDS:
        names = ", ".join(fields) if isinstance(values, dict) else f"a {type(values).__name__}"
        raise UserError(
            f"{location} has {names or 'nothing'}; a message has role and content, and optionally a name, "
            "tool_calls or a tool_call_id"
        )
    return fields


def _check_roles(fields: Mapping[str, Any], location: str) -> None:
    # A template would ignore these fields in other messages.
    for name, role in _FIELD_ROLES.items():
        if name in fields and fields["role"] != role:
            raise UserError(
                f"{location} is from the {fields['role']} and has {name}; only messages of the {role} have it"
            )


def _check_surrogates(fields: Mapping[str, Any], location: str) -> None:
    # JSON can contain lone surrogates; they have no UTF-8 encoding, which tokenizers require.
    for text in (fields.get(name, "") for name in ("content", "name", "tool_call_id")):
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{location} has half a surrogate pair at character {error.start}; it must be text"
            ) from error
