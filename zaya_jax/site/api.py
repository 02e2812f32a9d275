"""A page for each room: its modules with their functions, classes and values, as Markdown for Sphinx."""

import ast
import json
import re
from collections.abc import Iterator

from zaya_jax.site.docstrings import parse, to_markdown
from zaya_jax.site.names import Definition, Module, Names, public

LONGEST_VALUE = 60
_CODE = re.compile(r"(?<![`{}\w])`([A-Za-z_][\w.]*)(?:\(\))?`(?!`)")
_FENCE = re.compile(r"^\s*(```|:::)")


def room_page(room: str, modules: list[Module], names: Names) -> str:
    """The page of a room.

    Args:
      room: its full name, as that of a package.
      modules: those in it; first the one that is the room itself, if there is one.
      names: of all packages, for links.
    """
    blocks = [f"# {room}"]
    for module in sorted(modules, key=lambda module: module.name):
        blocks += list(_module_blocks(module, names, has_title=module.name != room))
    return "\n\n".join(blocks) + "\n"


def _module_blocks(module: Module, names: Names, *, has_title: bool) -> Iterator[str]:
    if has_title:
        yield f"## {module.name.rpartition('.')[2]}"
    # Its directive first: what follows is found by names within it.
    yield f"```{{py:module}} {module.name}\n```"
    yield linked(to_markdown(parse(ast.get_docstring(module.tree, clean=False))), names, module.name)
    for name, node, raw in public(module.tree.body):
        yield _definition(name, node, raw, names, module.name, depth=0)


def _definition(name: str, node: Definition, raw: str | None, names: Names, where: str, *, depth: int) -> str:
    """The directive of a name, with what a class defines within it."""
    docstring = parse(raw)
    inside = [linked(to_markdown(docstring, leave_out=("Attributes",)), names, where)]
    if isinstance(node, ast.ClassDef):
        attributes = docstring.entries("Attributes")
        for inner, definition, inner_raw in public(node.body):
            named = attributes.pop(inner, None)  # a property may be named there too
            text = inner_raw or named
            inside.append(_definition(inner, definition, text, names, where, depth=depth + 1))
        inside += [  # that no line of the class names: __init__ sets them
            _directive("attribute", each, [], linked(text, names, where), depth + 1)
            for each, text in attributes.items()
            if each.isidentifier()
        ]
        bases = ", ".join(ast.unparse(base) for base in node.bases)
        return _directive("class", f"{name}({bases})" if bases else name, [], _join(inside), depth)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return _directive(*_function(node, is_method=depth > 0), _join(inside), depth)
    return _directive("attribute" if depth else "data", name, _value(node), _join(inside), depth)


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, *, is_method: bool) -> tuple[str, str, list[str]]:
    decorators = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if is_method and decorators & {"property", "cached_property"}:
        return (
            "property",
            node.name,
            [f":type: {json.dumps(ast.unparse(node.returns))}"] if node.returns else [],
        )
    options = [f":{each}:" for each in ("classmethod", "staticmethod") if each in decorators]
    arguments = ast.unparse(node.args)
    if is_method and "staticmethod" not in decorators:
        arguments = re.sub(r"^(self|cls)(, (?!\*, *$|/)|$)", "", arguments)
    return "method" if is_method else "function", f"{node.name}({arguments}){returns}", options


def _value(node: Definition) -> list[str]:
    options = []
    if isinstance(node, ast.AnnAssign):
        options.append(f":type: {json.dumps(ast.unparse(node.annotation))}")
    value = getattr(node, "value", None)
    if value is not None and "\n" not in (text := ast.unparse(value)) and len(text) <= LONGEST_VALUE:
        options.append(f":value: {json.dumps(text)}")  # options are YAML, which would drop quotes
    return options


def _directive(kind: str, signature: str, options: list[str], inside: str, depth: int) -> str:
    fence = ":" * (6 - depth)  # the outer fence is the longer one
    return "\n".join([f"{fence}{{py:{kind}}} {signature}", *options, "", inside, fence])


def _join(blocks: list[str]) -> str:
    return "\n\n".join(filter(None, blocks))


def linked(text: str, names: Names, module: str = "") -> str:
    """Markdown in which names of ours in backticks are links, and tags of sources are too.

    Args:
      text: in Markdown, whose fenced code is left alone.
      names: that are shown somewhere.
      module: in which the text stands, whose names need no more.
    """
    lines, is_code = [], False
    for line in text.splitlines():
        if _FENCE.match(line):
            is_code = not is_code if line.strip().startswith("```") else is_code
        elif not is_code:
            line = _CODE.sub(lambda found: _reference(found, names, module), line)
        lines.append(line)
    return "\n".join(lines)


def _reference(found: re.Match, names: Names, module: str) -> str:
    full = names.resolve(found[1], module)
    return found[0] if full is None else f"{{py:obj}}`{found[1]} <{full}>`"
