"""A Jinja environment for chat templates as in transformers, which tracks who wrote each character.

Literals of a template become `TracedText` of the template, and messages become `TracedText` of a user. The
result then has the origin of each character.
"""

import dataclasses
import datetime
import functools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
from jinja2.parser import Parser

from zaya_jax.data.chats.templates.traced_text import (
    BEGIN,
    END,
    NUMBER,
    TEMPLATE,
    USER,
    TracedMarkup,
    TracedText,
    as_text,
    brace_format,
    concat,
    derive,
    of_template,
    origins_of,
)

THINK, THINK_END = "<think>", "</think>"
_THOUGHT_MARKS = re.compile(f"{THINK}|{THINK_END}")
_ROLES = {"system", "developer", "user", "assistant", "model", "tool", "function", "ipython"}
_LITERALS = 4096
_RUNS = re.compile(rb"(.)\1*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class RenderedChat:
    """A rendered chat, in plain values so that it can be sent as JSON.

    Attributes:
      text: rendered text, without the marks of `{% generation %}` blocks.
      runs: (number of characters, origin) of consecutive characters with the same origin.
      generated: (first character, character after the last) of each `{% generation %}` block.
    """

    text: str
    runs: list[tuple[int, int]]
    generated: list[tuple[int, int]]

    def up_to(self, end: int) -> "RenderedChat":
        """Returns the chat up to character `end`."""
        runs, left = [], end
        # Cut the run that contains the end, and drop all later ones.
        for size, origin in self.runs:
            if left > 0:
                runs.append((min(size, left), origin))
            left -= size
        generated = [(first, min(last, end)) for first, last in self.generated if first < end]
        return RenderedChat(self.text[:end], runs, generated)


def marks_generation(text: str) -> bool:
    """Whether a template has a `{% generation %}` block.

    Raises:
      jinja2.TemplateSyntaxError: if it is not valid Jinja.
    """
    _compiled(text)
    # Uses Jinja's own parser, because `{% generation %}` in a comment or raw block does not count.
    written = _environment().parse(text).find_all(jinja2.nodes.TemplateData)
    return any(isinstance(each.data, TracedText) for each in written)


def render(text: str, chat: Mapping[str, Any]) -> RenderedChat:
    """Renders a chat.

    Args:
      text: the template.
      chat: `messages`, each with `role` and `content`; `tools`, a list or None; `trusted`, variables that may
        contain special tokens; `variables`, other variables, set by the user; `add_generation_prompt`.

    Raises:
      Exception: any exception, because the template is code.
    """
    traced = _compiled(text).render(
        # User variables come first, so that they cannot replace the others.
        {
            **_as_user(chat["variables"]),
            **{name: of_template(value) for name, value in chat["trusted"].items()},
            "messages": list(map(_message, chat["messages"])),
            # Templates test these variables of transformers without `is defined`.
            "tools": _as_user(chat["tools"]),
            "documents": None,
            "add_generation_prompt": chat["add_generation_prompt"],
        }
    )
    return _without_marks(str.__str__(traced), origins_of(traced))


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    # A known role may be part of a token's name, as in "<|" + role + "|>". An arbitrary role, such as
    # "im_end", may not.
    origin = NUMBER if role in _ROLES else USER
    values: dict[str, Any] = {
        "role": TracedText(role, bytes((origin,)) * len(role)),
        "content": _assistant_content(content) if role == "assistant" and content else _as_user(content),
    }
    return values | {name: _as_user(value) for name, value in message.items() if name not in values}


def _assistant_content(content: str) -> TracedText:
    """Content of the assistant; the special tokens around a thought in it count as the template's."""
    origins = bytearray(len(content))
    for mark in _THOUGHT_MARKS.finditer(content):
        origins[mark.start() : mark.end()] = bytes((TEMPLATE,)) * len(mark[0])
    return TracedText(content, bytes(origins))


def _as_user(value: Any) -> Any:
    """Marks all text in a JSON value as the user's."""
    if isinstance(value, str):
        return TracedText(value, bytes(len(value)))
    if isinstance(value, Mapping):
        return {_as_user(name): _as_user(each) for name, each in value.items()}
    return list(map(_as_user, value)) if isinstance(value, list) else value


def _without_marks(text: str, origins: bytes) -> RenderedChat:
    pieces: list[str] = []
    runs: list[tuple[int, int]] = []
    generated: list[tuple[int, int]] = []
    begun: list[int] = []
    position = length = 0
    for run in _RUNS.finditer(origins):
        origin, size = run[0][0], len(run[0])
        if origin == BEGIN:
            begun.append(length)
        # An unmatched end can occur if a template splits or slices its own output.
        elif origin == END:
            if begun:
                # Blocks may be nested, so the most recent start matches.
                generated.append((begun.pop(), length))
        else:
            pieces.append(text[position : position + size])
            runs.append((size, origin))
            length += size
        position += size
    return RenderedChat("".join(pieces), runs, sorted(generated))


# The environment


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}`: writes its content between two marks."""

    tags = {"generation"}  # noqa: RUF012  (Jinja's name and type)

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        """Parses the block; Jinja calls this method."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # The marks are noncharacters with their own origins, so user text cannot forge them.
        begin, end = (
            jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)], lineno=line)
            for mark in (_BEGIN_MARK, _END_MARK)
        )
        return [begin, *body, end]


_BEGIN_MARK, _END_MARK = TracedText("\ufdd0", bytes((BEGIN,))), TracedText("\ufdd1", bytes((END,)))


class _CodeGenerator(jinja2.compiler.CodeGenerator):
    """Compiles templates such that literals and printed values keep their origins."""

    def visit_Const(self, node: jinja2.nodes.Const, frame: jinja2.compiler.Frame) -> None:
        """Writes a constant; text keeps the template as its origin."""
        value = node.as_const(frame.eval_ctx)
        if isinstance(value, str):
            self.write(f"environment.literal({str.__str__(value)!r})")
        else:
            # Numbers, booleans and None have no characters.
            super().visit_Const(node, frame)

    def visit_TemplateData(self, node: jinja2.nodes.TemplateData, frame: jinja2.compiler.Frame) -> None:
        """Writes the text between blocks."""
        self.write(self._output_const_repr([node.data]))

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        """Writes the code for `a ~ b`, which keeps the origins of both."""
        self.write("environment.concat(map(environment.as_text, (")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write(")))")

    def _output_const_repr(self, group: Iterable[Any]) -> str:
        pieces = list(group)
        # A generation mark is alone in its Output node, see `_Generation.parse`.
        if isinstance(pieces[0], TracedText):
            return f"environment.marks[{str.__str__(pieces[0])!r}]"
        return f"environment.literal({''.join(pieces)!r})"

    def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
        if isinstance(node, jinja2.nodes.TemplateData):
            return node.data
        # Prevents Jinja from printing constants at compile time as plain text.
        raise jinja2.nodes.Impossible()

    def _output_child_pre(self, node: Any, frame: Any, finalize: Any) -> None:
        del node, frame, finalize
        self.write("environment.as_text(")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox: templates come from others, and may only access what they are given."""

    code_generator_class = _CodeGenerator
    concat = staticmethod(concat)
    as_text = staticmethod(as_text)
    literal = staticmethod(functools.lru_cache(_LITERALS)(of_template))
    marks: Mapping[str, TracedText] = {str.__str__(mark): mark for mark in (_BEGIN_MARK, _END_MARK)}

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Replaces `str.format` in the sandbox by a version that keeps origins."""
        # Not a bound `str.format` or `format_map`.
        if super().wrap_str_format(value) is None:
            return None
        text, is_map = value.__self__, value.__name__ == "format_map"
        formatter = jinja2.sandbox.SandboxedFormatter(self)

        def wrapper(*args: Any, **kwargs: Any) -> str:
            args, kwargs = ((), args[0]) if is_map else (args, kwargs)
            return brace_format(formatter, text, args, kwargs)

        return wrapper


@functools.lru_cache(16)
def _compiled(text: str) -> jinja2.Template:
    return _environment().from_string(text)


@functools.cache
def _environment() -> _Environment:
    # optimized=False, because constants that Jinja folds would lose their origins.
    environment = _Environment(
        # The same white-space options as in transformers.
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,
        extensions=[_Generation, jinja2.ext.loopcontrols],
    )
    environment.filters = {name: _followed(each) for name, each in environment.filters.items()}
    environment.filters |= {
        "tojson": _to_json,
        # These filters are replaced by versions that track origins or behave as in transformers.
        "join": _join,
        "replace": _replace,
        "safe": TracedMarkup.of,
        "list": list,
    }
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: derive(datetime.datetime.now().strftime(form), form),
        # Jinja's globals are Python classes, whose attributes the sandbox must not expose.
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment


def _followed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a filter of Jinja so that its result keeps origins as far as `derive` can."""

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        # A TracedText already has its origins; other types have none.
        if type(result) is not str:
            return result
        # Some filters receive the environment or context as first argument, which is not text.
        sources = args[1:] if hasattr(function, "jinja_pass_arg") else args
        return derive(result, *sources, *kwargs.values())

    return wrapper


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | int | None = None
) -> str:
    if attribute is not None:
        value = map(jinja2.filters.make_attrgetter(environment, attribute), value)
    return TracedText(as_text(d)).join(map(as_text, value))


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    # Jinja's own filter returns a plain `str`.
    return TracedText(as_text(s)).replace(as_text(old), as_text(new), -1 if count is None else count)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters for HTML; transformers replaces it in the same way.
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return derive(text, [value])


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Dict:
    """`dict`, without the attributes of a class, which templates could use to escape the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Returns a dict with these keys, as `dict.fromkeys` does."""
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace that rejects names with a leading underscore, which could expose Python attributes."""

    def __init__(*args: Any, **kwargs: Any):  # "self" may be one of the names
        namespace, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(namespace, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot have the name {name!r}")
