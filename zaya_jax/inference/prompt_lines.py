"""Prompts as JSON lines: `{"prompt": "..."}` or `{"messages": [...]}`, read with suspicion."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zaya_jax.data.chat_records import parse_messages
from zaya_jax.inference.prompting import Prompt, Prompting
from zaya_jax.json_files import parse_object

ADDED = ("text", "finish_reason", "num_prompt_tokens", "num_new_tokens", "tokens", "logprobs")
"""Fields that an answer adds to those of its line."""
LARGEST_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class PromptLine:
    """A line of a file of prompts.

    Attributes:
      number: of the line, from 1.
      fields: all that it has; its answer repeats them.
      prompt: its tokens.
      limit: new tokens that it may have.
      seed: of its draws. Its text is of this and of its prompt alone, not of other lines.
    """

    number: int
    fields: Mapping[str, Any]
    prompt: Prompt
    limit: int
    seed: int


def read_prompt_lines(
    file: str, prompting: Prompting, *, max_new_tokens: int, seed: int, allowed: int
) -> list[PromptLine]:
    """All prompts of a file, each checked before the first is continued; empty lines are passed over.

    Args:
      file: its path.
      prompting: how they become tokens.
      max_new_tokens: of a line that does not say.
      seed: of the first line, where that does not say; of the n-th it is n - 1 more.
      allowed: tokens that a prompt may have with its continuation.

    Raises:
      ValueError: for a line that cannot be continued, naming file and line; or if there is none.
    """
    found = []
    for number, raw in _lines(pathlib.Path(file)):
        place = f"{file}:{number}"
        fields = _checked(parse_object(raw, place), place)
        limit = _whole(fields, "max_new_tokens", max_new_tokens, place, least=1, most=allowed)
        own_seed = (seed + number - 1) % (LARGEST_SEED + 1)
        own_seed = _whole(fields, "seed", own_seed, place, least=0, most=LARGEST_SEED)
        prompt = _prompt(fields, prompting, place)
        if len(prompt.tokens) == 0:
            raise ValueError(f"{place} has no token; of this run's tokenizer a prompt must have at least one")
        if len(prompt.tokens) + limit > allowed:
            raise ValueError(
                f"{place} has {len(prompt.tokens)} tokens and max_new_tokens {limit}; together they must not "
                f"exceed model.max_position_embeddings, {allowed}"
            )
        found.append(PromptLine(number, fields, prompt, limit, own_seed))
    if not found:
        raise ValueError(f'{file} has no line; it must have at least one, such as {{"prompt": "def main("}}')
    return found


def _lines(file: pathlib.Path) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as lines:
        yield from ((number, raw) for number, raw in enumerate(lines, 1) if raw.strip())


def _checked(fields: dict[str, Any], place: str) -> dict[str, Any]:
    """The fields, if an answer can repeat them."""
    if ("prompt" in fields) == ("messages" in fields):
        raise ValueError(
            f'{place} must have either "prompt" or "messages"; it has {", ".join(fields) or "{}"}'
        )
    if lost := [name for name in ADDED if name in fields]:
        raise ValueError(f'{place} has "{lost[0]}", where its answer stands later; give it another name')
    try:
        json.dumps(fields, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{place} has half a surrogate pair; it must be text") from error
    return fields


def _whole(fields: Mapping, name: str, default: int, place: str, *, least: int, most: int) -> int:
    value = fields.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise ValueError(
            f"{place} has {name} {value!r:.40}; it must be a whole number from {least} to {most}"
        )
    return value


def _prompt(fields: Mapping[str, Any], prompting: Prompting, place: str) -> Prompt:
    if "messages" in fields:
        messages = parse_messages(fields["messages"], place, "messages")
        return _at(place, lambda: prompting.of_messages(messages))
    text = fields["prompt"]
    if not isinstance(text, str):
        raise ValueError(f"{place} has a prompt that is a {type(text).__name__}; it must be text")
    return _at(place, lambda: prompting.of_text(text))


def _at(place: str, make: Callable[[], Prompt]) -> Prompt:
    """What is made of a line; an error says of which."""
    try:
        return make()
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
