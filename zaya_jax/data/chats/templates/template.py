"""Chat templates: Jinja that renders a chat as text, with the author of each character.

`{% generation %}` blocks mark what a model learns, as in transformers ([HF]). The built-in template is
rendered in this process. All others are code from elsewhere, so a worker process with limits on time and
memory renders them (`zaya_jax.data.chats.templates.worker_pool`).

The template of a tokenizer is searched as in transformers: `chat_template.jinja` with named templates in
`additional_chat_templates/`; then `chat_template.json`, which processors wrote; then the field
`chat_template` of `tokenizer_config.json`. If a template exists but is invalid, this is an error; the
built-in template never replaces it.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.data.chats.records import Message
from zaya_jax.data.chats.templates.jinja_environment import THINK, THINK_END, RenderedChat, render
from zaya_jax.data.chats.templates.worker import sentence_of
from zaya_jax.data.chats.templates.worker_pool import render_all
from zaya_jax.data.chats.tool_records import Tool
from zaya_jax.data.tokenizers.tokenizer import BYTE_TOKENIZERS, Tokenizer
from zaya_jax.data.tokenizers.tokenizer_files import CHAT_TEMPLATE, TOKENIZER_CONFIG
from zaya_jax.errors import UserError
from zaya_jax.files.json_files import read_json, read_limited

__all__ = [
    "THINK", "THINK_END", "TURN_END", "TURN_START", "ZAYA", "ChatInput", "ChatTemplate", "load_template",
]  # fmt: skip

ZAYA = "zaya"
"""Name of the built-in template."""
# Uses the turn delimiters, think blocks and tool calls of ZAYA1 ([Weights]: the tokenizer of ZAYA1-8B), but
# not the text of its template. The BOS in front is our choice: every document of the pretraining starts with
# it. Values that are not text are JSON, so that a parser can distinguish true, null and numbers from words.
_ZAYA_TEMPLATE = """\
{%- macro write_call(function) %}
    {{- '<zyphra_tool_call>\\n<function=' + function.name + '>\\n' }}
    {%- for name, value in function.arguments | items %}
        {{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) }}
        {{- '\\n</parameter>\\n' }}
    {%- endfor %}
    {{- '</function>\\n</zyphra_tool_call>' }}
{%- endmacro %}
{{- bos_token }}
{%- set state = namespace(has_tools=tools is not none and tools | length > 0) %}
{%- if state.has_tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n\\nYou may call these functions:\\n<tools>\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '</tools>\\n\\nA call has this form:\\n<zyphra_tool_call>\\n<function=NAME>\\n' }}
    {{- '<parameter=NAME>\\nvalue\\n</parameter>\\n</function>\\n</zyphra_tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{ message.content or '' }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- set state.has_tools = true %}
            {{- ('' if loop.first and not message.content else '\\n') + write_call(tool_call.function) }}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- elif message.role == 'tool' and state.has_tools %}
        {{- '<|im_start|>user\\n<zyphra_tool_response>\\n' + message.content }}
        {{- '\\n</zyphra_tool_response><|im_end|>\\n' }}
    {%- elif not (loop.first and state.has_tools and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
_DEFAULT = "default"
_ADDITIONAL = "additional_chat_templates"
_LEGACY = "chat_template.json"
_FIELD = "chat_template"


@dataclasses.dataclass(frozen=True)
class ChatInput:
    """A chat as input of a template.

    Attributes:
      messages: messages of the chat, at least one.
      add_generation_prompt: whether the text ends with the start of the assistant's next turn.
      variables: variables of the template that the user sets, by name.
      tools: tools that the assistant may call.
    """

    messages: Sequence[Message]
    add_generation_prompt: bool = False
    variables: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tools: Sequence[Tool] = ()


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A Jinja chat template.

    Attributes:
      name: "zaya", or the path of the template's file.
      text: the template in Jinja.
    """

    name: str
    text: str

    @property
    def is_built_in(self) -> bool:
        """Whether it is the built-in template, which runs save as a file."""
        return self.text == _ZAYA_TEMPLATE

    @functools.cached_property
    def marks_generation(self) -> bool:
        """Whether it has a `{% generation %}` block, which marks what a model learns.

        Raises:
          UserError: if it is not valid Jinja.
        """
        (reply,) = render_all(self.text, [None])
        if "error" in reply:
            raise self._refusal(reply["error"])
        return reply["marks_generation"]

    def render(self, chat: ChatInput, *, trusted: Mapping[str, str]) -> RenderedChat:
        """Renders one chat; see `render_all`.

        Raises:
          UserError: if the template rejects the chat, is invalid, or exceeds the time or memory limit.
        """
        (rendered,) = self.render_all([chat], trusted=trusted)
        if isinstance(rendered, UserError):
            raise rendered
        return rendered

    def render_all(
        self, chats: Sequence[ChatInput], *, trusted: Mapping[str, str]
    ) -> Iterator[RenderedChat | UserError]:
        """Renders chats, and yields each as soon as it is ready.

        Args:
          chats: chats to render.
          trusted: variables that contain names of special tokens, such as `bos_token`.

        Yields:
          A rendered chat, or the error if it cannot be rendered. After a timeout no further chat follows.
        """
        values = [_values(chat, trusted) for chat in chats]
        # Our own template is trusted, and needs no process.
        if self.is_built_in:
            yield from (self._render_here(each) for each in values)
            return
        for reply in render_all(self.text, values):
            if "error" in reply:
                yield self._refusal(reply["error"])
            else:
                # JSON turns tuples into lists.
                pairs = {name: [tuple(pair) for pair in reply[name]] for name in ("runs", "generated")}
                yield RenderedChat(reply["text"], **pairs)

    def render_first(
        self, chats: Sequence[ChatInput], *, trusted: Mapping[str, str]
    ) -> tuple[ChatInput, RenderedChat]:
        """Returns the first of several chats that the template accepts, and how it renders that one.

        Raises:
          UserError: the error of the first chat, if the template rejects all of them.
        """
        rendered = list(self.render_all(chats, trusted=trusted))
        # After a timeout there are fewer.
        for chat, each in zip(chats, rendered, strict=False):
            if isinstance(each, RenderedChat):
                return chat, each
        raise next(each for each in rendered if isinstance(each, UserError))

    def _render_here(self, values: Mapping[str, Any]) -> RenderedChat | UserError:
        try:
            return render(self.text, values)
        # Any exception, as in the worker: a variable of a user may have an unexpected type.
        except Exception as error:
            return self._refusal(sentence_of(error))

    def _refusal(self, reason: str) -> UserError:
        return UserError(f"the chat template {self.name} cannot render the chat: {reason}")


def _values(chat: ChatInput, trusted: Mapping[str, str]) -> dict[str, Any]:
    """A chat as plain values, as `zaya_jax.data.chats.templates.jinja_environment.render` reads them."""
    return {
        "messages": [message.to_json() for message in chat.messages],
        # transformers passes None if there are none.
        "tools": list(chat.tools) or None,
        "trusted": dict(trusted),
        "variables": dict(chat.variables),
        "add_generation_prompt": chat.add_generation_prompt,
    }


# Finding templates


def load_template(name: str | None, tokenizer: Tokenizer) -> ChatTemplate:
    """Loads a chat template.

    Args:
      name: "zaya" for the built-in template; the path of a Jinja file; the name of one of several templates
        of the tokenizer; or None for the tokenizer's default template, else the built-in one.
      tokenizer: tokenizer whose folder is searched.

    Raises:
      UserError: if the template does not exist, or the choice is ambiguous.
    """
    if name == ZAYA:
        return ChatTemplate(ZAYA, _ZAYA_TEMPLATE)
    # A file takes precedence over a name of the tokenizer's templates.
    if name is not None and pathlib.Path(name).is_file():
        return _read_template(pathlib.Path(name))
    named = {} if tokenizer.name in BYTE_TOKENIZERS else _templates_in(pathlib.Path(tokenizer.name).parent)
    if name is not None:
        if name not in named:
            others = f", or one of the tokenizer's: {', '.join(named)}" if named else ""
            raise UserError(
                f'unknown chat template "{name}"; it must be "{ZAYA}" or the path of a Jinja file{others}'
            )
        return named[name]
    # Any choice here would be a guess.
    if named and _DEFAULT not in named:
        raise UserError(
            f"the tokenizer {tokenizer.name} has the chat templates {', '.join(named)} and no default; "
            f"choose one (--template {next(iter(named))}), or the path of a Jinja file, or "
            f'"{ZAYA}" for the built-in one'
        )
    return named.get(_DEFAULT) or ChatTemplate(ZAYA, _ZAYA_TEMPLATE)


def _templates_in(folder: pathlib.Path) -> dict[str, ChatTemplate]:
    """The templates in the folder of a tokenizer, by name."""
    files = {_DEFAULT: folder / CHAT_TEMPLATE}
    files |= {path.stem: path for path in sorted((folder / _ADDITIONAL).glob("*.jinja"))}
    if templates := {name: _read_template(path) for name, path in files.items() if path.is_file()}:
        return templates
    for path in (folder / _LEGACY, folder / TOKENIZER_CONFIG):
        if path.is_file() and (value := read_json(path).get(_FIELD)) is not None:
            return _named(value, path)
    return {}


def _named(value: Any, path: pathlib.Path) -> dict[str, ChatTemplate]:
    """Parses the field `chat_template` of a file: one template, or several by name."""
    if isinstance(value, str):
        return {_DEFAULT: ChatTemplate(str(path), value)}
    # Both forms occur: a mapping, and a list of {"name", "template"} objects.
    pairs = value.items() if isinstance(value, dict) else _pairs(value, path)
    templates: dict[str, ChatTemplate] = {}
    for name, text in pairs:
        if not isinstance(name, str) or not isinstance(text, str):
            raise _wrong(path)
        templates[name] = ChatTemplate(str(path) if name == _DEFAULT else f"{path} ({name})", text)
    return templates


def _pairs(value: Any, path: pathlib.Path) -> list[tuple[Any, Any]]:
    if not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        raise _wrong(path)
    return [(each.get("name"), each.get("template")) for each in value]


def _wrong(path: pathlib.Path) -> UserError:
    return UserError(
        f'{path}: {_FIELD} must be text, or a list of {{"name": text, "template": text}}; correct it, or '
        "choose another template (--template)"
    )


def _read_template(path: pathlib.Path) -> ChatTemplate:
    try:
        return ChatTemplate(str(path), read_limited(path).decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"the chat template {path} is not UTF-8: {error}") from error
