"""Chat templates: Jinja that writes a chat as text, and marks of what in that text is not the template's.

What the model is to learn stands in `{% generation %}` blocks, as transformers has them ([HF]). In the text
that Jinja gives, marks stand around these, and around each name of a special token that somebody wrote into
a message: that one is text, and only the template's own are tokens.
"""

import dataclasses
import datetime
import functools
import json
import pathlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
from jinja2.parser import Parser

from zaya_jax.data.chat_records import ASSISTANT, Message
from zaya_jax.data.tokenizer import BYTE_TOKENIZERS, Tokenizer
from zaya_jax.json_files import read_json

ZAYA = "zaya"
"""The name of the template that is built in."""
# ZAYA1's borders and think blocks ([Weights]: the tokenizer of ZAYA1-8B). Its template's whole text is not
# ours; BOS in front is our choice: every document that the base model has read begins so.
_ZAYA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
THINK, THINK_END = "<think>", "</think>"

# Noncharacters: Unicode keeps them for use within a program, and no text has them.
_GENERATED, _GENERATED_END, _SAID, _SAID_END = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
_MARKS = re.compile(f"([{_GENERATED}-{_SAID_END}])")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A chat as a template writes it. Spans are (first, behind the last) characters.

    Attributes:
      text: without marks.
      generated: spans that the model is to learn.
      said: spans of names of special tokens that stand in messages and are text there.
    """

    text: str
    generated: tuple[tuple[int, int], ...]
    said: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template of chats.

    Attributes:
      name: "zaya", or the file that it was found in.
      text: in Jinja.
    """

    name: str
    text: str

    @property
    def marks_generation(self) -> bool:
        """Whether it says what the model is to learn."""
        return re.search(r"\{%[-+]?\s*generation\b", self.text) is not None

    def render(
        self,
        messages: Sequence[Message],
        *,
        specials: Collection[str],
        variables: Mapping[str, str],
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Writes a chat.

        Args:
          messages: at least one.
          specials: names of the special tokens.
          variables: others that the template may ask for, such as `bos_token`.
          add_generation_prompt: begins the turn of the assistant behind the last message.

        Raises:
          ValueError: when the template refuses the messages or is wrong, when a message has a character that
            marks, or when the template takes the name of a special token in a message apart.
        """
        guarded = [{"role": message.role, "content": _guard(message, specials)} for message in messages]
        try:
            marked = self._compiled.render(
                messages=guarded,
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except Exception as error:  # a template computes, and may raise anything that Python does
            raise ValueError(f"the chat template {self.name} cannot write it: {error}") from error
        return _without_marks(marked, specials)

    @functools.cached_property
    def _compiled(self) -> jinja2.Template:
        return _environment().from_string(self.text)


def load_template(name: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Loads "zaya", the Jinja file at a path, or without a name what lies beside the tokenizer, else "zaya".

    Raises:
      ValueError: when there is no such file.
    """
    if name is not None and name != ZAYA:
        return _read_template(pathlib.Path(name))
    found = None
    if name is None and tokenizer.name not in BYTE_TOKENIZERS:
        found = _beside(pathlib.Path(tokenizer.name).parent)
    return found or ChatTemplate(ZAYA, _ZAYA_TEMPLATE)


def _read_template(path: pathlib.Path) -> ChatTemplate:
    if not path.is_file():
        raise ValueError(
            f'there is no chat template "{path}"; it must be "{ZAYA}" or the path of a Jinja file'
        )
    return ChatTemplate(str(path), path.read_text(encoding="utf-8"))


def _beside(folder: pathlib.Path) -> ChatTemplate | None:
    """The template in the folder of a tokenizer.json, where transformers looks for it."""
    if (path := folder / "chat_template.jinja").is_file():
        return _read_template(path)
    if not (path := folder / "tokenizer_config.json").is_file():
        return None
    found = read_json(path).get("chat_template")
    if isinstance(found, list):  # of several, by name
        found = next((each["template"] for each in found if each.get("name") == "default"), None)
    return None if found is None else ChatTemplate(str(path), found)


def _guard(message: Message, specials: Collection[str]) -> str:
    """The content, with marks around names of special tokens that are none there."""
    content = message.content
    if mark := _MARKS.search(content):
        raise ValueError(f"a message has the character U+{ord(mark[0]):04X}, which no text has; remove it")
    # What the assistant thinks is part of its content, with its borders.
    said = set(specials) - ({THINK, THINK_END} if message.role == ASSISTANT else set())
    if not said:
        return content
    longest_first = sorted(said, key=len, reverse=True)
    return re.sub("|".join(map(re.escape, longest_first)), rf"{_SAID}\g<0>{_SAID_END}", content)


def _without_marks(marked: str, specials: Collection[str]) -> Rendered:
    """Takes the marks out of a text, and says where they were."""
    pieces: list[str] = []
    begun: dict[str, int] = {}
    spans: dict[str, list[tuple[int, int]]] = {_GENERATED: [], _SAID: []}
    position = 0
    for piece in _MARKS.split(marked):
        if piece in spans:
            begun[piece] = position
        elif piece in (_GENERATED_END, _SAID_END):
            begin = _GENERATED if piece == _GENERATED_END else _SAID
            # One without its other is seen below, as an empty name.
            spans[begin].append((begun.pop(begin, position), position))
        else:
            pieces.append(piece)
            position += len(piece)
    text = "".join(pieces)
    if _SAID in begun or any(text[first:last] not in specials for first, last in spans[_SAID]):
        # What was around the name is not known any more, nor what of it is the template's.
        raise ValueError(
            "a message has the name of a special token, which the template takes apart; remove it"
        )
    return Rendered(text, tuple(spans[_GENERATED]), tuple(spans[_SAID]))


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: writes what is within, between marks."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's name and type)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """The block, as Jinja asks for it."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)
            for mark in (_GENERATED, _GENERATED_END)
        )
        return [begin, *body, end]


@functools.cache
def _environment() -> jinja2.Environment:
    """As transformers has it: templates are others' code, and see no more than they are given."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # Jinja's own escapes what HTML does not like.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
