"""The tokens that end a text or an answer, for training masks, generation, the server, evaluation and export.

An answer ends with the token that the chat template writes after a turn of the assistant, with any token that
the generation config next to the tokenizer lists, or with the end of a document. Any other text ends with one
of the latter two.
"""

import dataclasses
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.records import ASSISTANT, Message
from zaya_jax.data.chats.templates.jinja_environment import RenderedChat
from zaya_jax.data.chats.templates.rendered_tokens import ChatEncoder, PlacedToken
from zaya_jax.data.chats.templates.template import ChatInput, ChatTemplate
from zaya_jax.data.tokenizers.tokenizer import BYTE_TOKENIZERS, Tokenizer
from zaya_jax.data.tokenizers.tokenizer_files import CHAT_TEMPLATE, GENERATION
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json

# Plain lowercase letters, which templates write unchanged, except that some change the case of messages.
_CONTENTS = ("zayauserone", "zayaassistantone", "zayausertwo", "zayaassistanttwo")
_SHOWN = 30
_WORD = re.compile(r"[^\W_]")


@dataclasses.dataclass(frozen=True)
class TurnEnds:
    """The special tokens that a template writes after the turns of a chat.

    Attributes:
      ids: special tokens after a turn of the assistant, in order of first appearance.
      problem: error message that says why a message could forge the end of a turn; None if it could not.
    """

    ids: tuple[int, ...] = ()
    problem: str | None = None


def end_ids_of(
    tokenizer: Tokenizer, *, turn_ends: Iterable[int] = (), listed: Iterable[int] = ()
) -> tuple[int, ...]:
    """All tokens that end an answer, without duplicates, those of the template first.

    Args:
      tokenizer: tokenizer, whose EOS always ends an answer.
      turn_ends: tokens that the chat template writes after a turn of the assistant.
      listed: `eos_token_id` of a generation config.
    """
    return tuple(dict.fromkeys((*turn_ends, *listed, tokenizer.eos_id)))


def text_end_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end a text that is not a chat."""
    return tuple(dict.fromkeys((tokenizer.eos_id, *listed_ends(tokenizer))))


def listed_ends(tokenizer: Tokenizer, template: str | None = None) -> tuple[int, ...]:
    """The end tokens in the generation config next to a tokenizer; empty without such a file.

    Args:
      tokenizer: tokenizer whose folder is searched.
      template: path of the chat template. A byte tokenizer has no folder, but a run on chats saves its
        generation config next to its template.

    Raises:
      UserError: if the file contains an invalid value.
    """
    folder = None
    if tokenizer.name not in BYTE_TOKENIZERS:
        folder = pathlib.Path(tokenizer.name).parent
    elif template is not None and pathlib.Path(template).name == CHAT_TEMPLATE:
        folder = pathlib.Path(template).parent
    if folder is None or not (folder / GENERATION).is_file():
        return ()
    value = read_json(folder / GENERATION).get("eos_token_id")
    # A model's vocabulary may be padded beyond its tokenizer's; those tokens are never trained.
    return tuple(
        each for each in read_end_ids(value, str(folder / GENERATION)) if each < tokenizer.vocab_size
    )


def read_end_ids(value: Any, place: str) -> tuple[int, ...]:
    """Parses `eos_token_id` of a generation config: a token id, a list of them, or null.

    Raises:
      UserError: if it is anything else.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(each) is not int or each < 0 for each in ids):
        raise UserError(f"{place}: eos_token_id is {value!r:.80}; it must be a token id, or a list of them")
    return tuple(ids)


def find_turn_ends(template: ChatTemplate, trusted: Mapping[str, str], encoder: ChatEncoder) -> TurnEnds:
    """Renders small chats, and finds the special tokens that the template writes after each turn.

    Args:
      template: chat template.
      trusted: variables of the template that contain names of special tokens.
      encoder: encoder for rendered chats.
    """
    user, answer, second_user, second_answer = (
        Message(role, content) for role, content in zip(("user", ASSISTANT) * 2, _CONTENTS, strict=True)
    )
    chat = (user, answer, second_user, second_answer)
    # Some templates require a system message, or support only a single turn.
    choices = [chat, (Message("system", "zayasystem"), *chat), chat[:2], (answer,)]
    try:
        accepted, rendered = template.render_first([ChatInput(each) for each in choices], trusted=trusted)
    except UserError as error:
        return TurnEnds(problem=str(error))
    return _ends_in(rendered, accepted.messages, encoder, template.name)


@dataclasses.dataclass(frozen=True)
class _Turn:
    """A message in a rendered chat: its role, its end, and the start of the next message."""

    role: str
    end: int
    next: int
    is_last: bool


def _ends_in(
    rendered: RenderedChat, messages: Sequence[Message], encoder: ChatEncoder, template: str
) -> TurnEnds:
    # Only special tokens can delimit turns, because user text can spell all others.
    specials = encoder.specials_among(encoder.encode(rendered), rendered.text)
    # Lowercase, because some templates change the case of messages.
    turns = _turns_in(rendered.text.lower(), messages)
    for message in messages[-2:]:
        if message.role not in [turn.role for turn in turns]:
            return TurnEnds(problem=f"the chat template {template} omits messages of the {message.role}")
    ids: list[int] = []
    for turn in turns:
        delimiter = _delimiter(turn, specials, rendered.text)
        if delimiter is not None and turn.role == ASSISTANT:
            ids.append(delimiter.token)
        # The last answer needs no end token if earlier answers have one.
        if delimiter is None and not (turn.is_last and ids and not rendered.text[turn.end :].strip()):
            written = rendered.text[turn.end : turn.next].strip()[:_SHOWN]
            problem = (
                f"the chat template {template} writes {written!r} after a message of the {turn.role}, which "
                f'has no special token of the tokenizer "{encoder.tokenizer.name}" where the turn ends, so '
                "that a message could forge the end; choose another template (--template), or a tokenizer "
                "that has its special tokens"
            )
            return TurnEnds(problem=problem)
    return TurnEnds(tuple(dict.fromkeys(ids)))


def _turns_in(text: str, messages: Sequence[Message]) -> list[_Turn]:
    """The turns of user and assistant that the template has rendered, in order."""
    # The last occurrence: a template may also quote the first message in a preamble.
    places = [(text.rfind(each.text), each) for each in messages if each.role != "system"]
    written = [(place, each) for place, each in places if place >= 0]
    following = [place for place, _ in written[1:]]
    return [
        _Turn(each.role, place + len(each.text), end, is_last=end == len(text))
        for (place, each), end in zip(written, [*following, len(text)], strict=True)
    ]


def _delimiter(turn: _Turn, specials: Sequence[PlacedToken], text: str) -> PlacedToken | None:
    """The special token that separates a turn from the next.

    Punctuation, such as a quote, may precede the end token of an answer, but not words: those would be the
    name of a special token that the tokenizer lacks.
    """
    within = (each for each in specials if turn.end <= each.first and each.last <= turn.next)
    delimiter = next(within, None)
    if delimiter is None or (turn.role == ASSISTANT and _WORD.search(text, turn.end, delimiter.first)):
        return None
    return delimiter
