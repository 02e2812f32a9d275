"""Reads and validates prompts as JSON lines: `{"prompt": ...}`, or `{"messages": [...], "tools": [...]}`."""

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from zaya_jax.data.chats.records import parse_messages
from zaya_jax.data.chats.tool_records import parse_tools
from zaya_jax.data.sources.json_lines import read_objects
from zaya_jax.errors import UserError
from zaya_jax.inference.engine.sampling_params import MAX_SEED
from zaya_jax.inference.prompting import Prompt, Prompting

ADDED = ("text", "finish_reason", "num_prompt_tokens", "num_new_tokens", "tokens", "logprobs")
"""Fields that an answer adds to the fields of its line."""
_OURS = ("prompt", "messages", "tools", "max_new_tokens", "seed", *ADDED)
"""Fields that are read here or added later. In these null means absent: `datasets` writes null where only
other lines have a field."""


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """A line of a prompt file.

    Attributes:
      number: line number, from 1.
      fields: all fields of the line; its answer repeats them.
      prompt: prompt tokens and end tokens.
      limit: maximum number of new tokens.
      seed: seed of the draws, which do not depend on other lines.
    """

    number: int
    fields: Mapping[str, Any]
    prompt: Prompt
    limit: int
    seed: int


def read_prompt_lines(
    file: str, prompting: Prompting, *, max_new_tokens: int, seed: int, max_length: int
) -> list[PromptLine]:
    """Reads all prompts of a file and checks each of them; empty lines are skipped.

    Args:
      file: path of the file, which may be compressed (see `zaya_jax.data.sources.json_lines`).
      prompting: how prompts become tokens.
      max_new_tokens: maximum number of new tokens of a line that does not set it.
      seed: seed of the first line, if the line sets none; line n has n - 1 more.
      max_length: maximum number of tokens of a prompt and its continuation together.

    Raises:
      UserError: for an invalid line, with file and line number; or if there is no line.
    """
    lines = []
    for place, number, values in read_objects(pathlib.Path(file)):
        fields = _checked_fields(values, place)
        limit = _integer(fields, "max_new_tokens", max_new_tokens, place, minimum=1, maximum=max_length)
        # From the number of the line and not of the prompt: an empty line does not change the seeds after it.
        default_seed = (seed + number - 1) % (MAX_SEED + 1)
        line_seed = _integer(fields, "seed", default_seed, place, minimum=0, maximum=MAX_SEED)
        prompt = _prompt(fields, prompting, place)
        if len(prompt.tokens) == 0:
            raise UserError(
                f"{place} has no token; with this run's tokenizer a prompt must have at least one"
            )
        if len(prompt.tokens) + limit > max_length:
            raise UserError(
                f"{place} has {len(prompt.tokens)} tokens and max_new_tokens {limit}; together they must not "
                f"exceed model.max_position_embeddings, {max_length}"
            )
        lines.append(PromptLine(number, fields, prompt, limit, line_seed))
    if not lines:
        raise UserError(f'{file} has no line; it must have at least one, such as {{"prompt": "def main("}}')
    return lines


def _checked_fields(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """Checks that an answer can repeat the fields; returns them without our fields that are null."""
    fields = {name: value for name, value in fields.items() if value is not None or name not in _OURS}
    if ("prompt" in fields) == ("messages" in fields):
        raise UserError(
            f'{place} must have either "prompt" or "messages"; it has {", ".join(fields) or "{}"}'
        )
    if taken := [name for name in ADDED if name in fields]:
        raise UserError(f'{place} has "{taken[0]}", which the answer adds; rename the field')
    try:
        # JSON can escape half a surrogate pair, which UTF-8 cannot encode: the answer could not be written.
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UserError(f"{place} has half a surrogate pair, which is not text") from error
    return fields


def _integer(fields: Mapping, name: str, default: int, place: str, *, minimum: int, maximum: int) -> int:
    value = fields.get(name, default)
    # bool is a subclass of int, and true is not a number of tokens.
    if type(value) is not int or not minimum <= value <= maximum:
        raise UserError(
            f"{place} has {name} {value!r:.40}; it must be an integer from {minimum} to {maximum}"
        )
    return value


def _prompt(fields: Mapping[str, Any], prompting: Prompting, place: str) -> Prompt:
    text = fields.get("prompt")
    if "messages" in fields:
        messages = parse_messages(fields["messages"], place, "messages")
        tools = parse_tools(fields.get("tools"), place)
        encode = functools.partial(prompting.of_messages, messages, tools)
    elif isinstance(text, str):
        encode = functools.partial(prompting.of_text, text)
    else:
        raise UserError(f"{place} has a prompt that is a {type(text).__name__}; it must be text")
    # Errors of the template name no line by themselves.
    try:
        return encode()
    except UserError as error:
        raise UserError(f"{place}: {error}") from error
