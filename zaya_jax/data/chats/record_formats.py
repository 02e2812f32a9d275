"""Converts records of other formats, ShareGPT and Alpaca, to messages.

ShareGPT: `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}`, with an
optional "system". Alpaca: `{"instruction": "...", "input": "...", "output": "..."}`, with optional "system"
and "history", a list of earlier (instruction, answer) pairs. An instruction and its input are joined by a
newline, as in LLaMA-Factory. Pairs of answers have "chosen" and "rejected" where a chat has the last answer.
"""

from collections.abc import Mapping
from typing import Any, Literal, get_args

from zaya_jax.errors import UserError

RecordFormat = Literal["messages", "sharegpt", "alpaca"]
FORMATS: tuple[str, ...] = get_args(RecordFormat)
# Roles by the value of "from" in ShareGPT.
_ROLES = {
    "system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant",
    "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant", "tool": "tool",
    "observation": "tool",
}  # fmt: skip
# The field that identifies each format.
_SHAREGPT, _ALPACA = "conversations", "instruction"
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}'


def detect_format(values: Mapping[str, Any], location: str) -> RecordFormat:
    """Detects the format of a record, a chat or a pair, by its fields.

    Args:
      values: fields of the record.
      location: location of the record, for error messages.

    Raises:
      UserError: if the format is unknown; the message shows a valid record.
    """
    # null counts as absent: `datasets` adds all fields of any record to every record.
    if values.get("messages") is not None:
        return "messages"
    if values.get(_SHAREGPT) is not None:
        return "sharegpt"
    if isinstance(values.get(_ALPACA), str) and any(name in values for name in ("output", "chosen")):
        return "alpaca"
    if any(name in values for name in ("messages", "prompt", "chosen", "rejected", "completion")):
        return "messages"
    listed = ", ".join(f'"{name}"' for name in [*values][:8]) or "no fields"
    raise UserError(
        f"{location} has {listed}; a chat is {_EXAMPLE}, or a record of ShareGPT ({_SHAREGPT}) or Alpaca "
        f"({_ALPACA}, input, output)"
    )


def messages_of(values: Mapping[str, Any], record_format: RecordFormat, location: str) -> Any:
    """The messages of a chat, not validated yet: a list of objects with "role" and "content".

    Raises:
      UserError: if the record does not have the format.
    """
    if record_format == "messages":
        return values.get("messages")
    if record_format == "sharegpt":
        return _sharegpt_prompt(values, location)
    return [*_alpaca_prompt(values, location), _turn("assistant", _text(values, "output", location))]


def pair_of(values: Mapping[str, Any], record_format: RecordFormat, location: str) -> Mapping[str, Any]:
    """The fields of a pair in the format of TRL: "prompt", "chosen" and "rejected".

    Raises:
      UserError: if the record does not have the format.
    """
    if record_format == "messages":
        return {name: value for name, value in values.items() if value is not None}
    make = _sharegpt_prompt if record_format == "sharegpt" else _alpaca_prompt
    sides = {
        name: _sharegpt_side(values.get(name), f"{location}, {name},") for name in ("chosen", "rejected")
    }
    return {"prompt": make(values, location), **sides}


def _sharegpt_prompt(values: Mapping[str, Any], location: str) -> list[Any]:
    turns = values.get(_SHAREGPT)
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{location} has no {_SHAREGPT}; a record of ShareGPT must have a list of them")
    system = values.get("system")
    # An empty system message means that there is none.
    first = [_turn("system", system)] if system else []
    return first + [_sharegpt_turn(turn, f"{location}, message {i},") for i, turn in enumerate(turns, 1)]


def _sharegpt_side(side: Any, location: str) -> Any:
    """An answer as a list of messages. ShareGPT has a single message; text is returned unchanged."""
    if isinstance(side, dict):
        return [_sharegpt_turn(side, location)]
    return [_sharegpt_turn(turn, location) for turn in side] if isinstance(side, list) else side


def _sharegpt_turn(turn: Any, location: str) -> Any:
    """A turn with "role" and "content". Other fields are kept, and validated as those of any message."""
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # parse_messages reports what is wrong with it
    role = _ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
    if role is None:
        raise UserError(f"{location} is from {turn['from']!r:.80}; it must be one of {', '.join(_ROLES)}")
    # Not dropped here: unknown fields such as "weight" must be reported, not ignored.
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    return others | _turn(role, turn.get("value"))


def _alpaca_prompt(values: Mapping[str, Any], location: str) -> list[dict[str, Any]]:
    instruction = _text(values, _ALPACA, location)
    extra_input = values.get("input") or ""
    if not isinstance(extra_input, str):
        raise UserError(f"{location} has an input that is a {type(extra_input).__name__}; it must be text")
    system = values.get("system")
    turns = [_turn("system", system)] if system else []
    # Earlier turns precede the instruction.
    for pair in values.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(
                f"{location} has a history that is not a list of pairs of an instruction and an answer"
            )
        turns += [_turn("user", pair[0]), _turn("assistant", pair[1])]
    return [*turns, _turn("user", f"{instruction}\n{extra_input}" if extra_input else instruction)]


def _text(values: Mapping[str, Any], name: str, location: str) -> str:
    if not isinstance(value := values.get(name), str):
        kind = "no" if value is None else "an"
        raise UserError(f"{location} has {kind} {name} that is text; a record of Alpaca must have it")
    return value


def _turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}
