"""Pages that nobody writes: each verb's help, and each field of a config."""

import ast
import contextlib
import importlib
import io
import os
import re
from collections.abc import Iterator

from zaya_jax.cli import VERBS
from zaya_jax.site.api import linked
from zaya_jax.site.docstrings import parse
from zaya_jax.site.names import Module, Names, public

_CHOICES = re.compile(r"\{([a-z][a-z-]*(?:,[a-z][a-z-]*)*)\}")
_LISTED = re.compile(r"^  VERB +((?:[a-z-]+,\s+)+[a-z-]+)$", re.MULTILINE)
_SECTION = re.compile(r"^[A-Z]\w*Config$")


def commands_page() -> str:
    """What `zaya VERB --help` says, of all verbs and the words that they take."""
    blocks = ["# Command line", "All of it is what `zaya VERB --help` prints."]
    for verb, (_, summary) in VERBS.items():
        text = _help([verb])
        assert text, f"zaya {verb} --help says nothing"
        blocks += [f"## zaya {verb}", summary.capitalize() + ".", _fenced(text)]
        for word, more in _words(verb, text):
            blocks += [f"### zaya {verb} {word}", _fenced(more)]
    return "\n\n".join(blocks) + "\n"


def _words(verb: str, text: str) -> Iterator[tuple[str, str]]:
    """The words behind a verb that have a help of their own."""
    usage = text.partition("\n\n")[0]
    seen = {text}
    words = [word for found in _CHOICES.findall(usage) for word in found.split(",")]
    if listed := _LISTED.search(text):  # `zaya aegis` has a parser for each of its words
        words += re.findall(r"[a-z-]+", listed[1])
    # One that an example has and no list of choices: `zaya plan failures`.
    words += re.findall(rf"^  zaya {verb} ([a-z][a-z-]+)(?= |$)", text, re.MULTILINE)
    for word in dict.fromkeys(words):
        more = _help([verb, word])
        if more and more not in seen:
            seen.add(more)
            yield word, more


def _help(words: list[str]) -> str:
    """What a verb prints; nothing where it does not take the words."""
    columns, printed = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = "100"
    main = importlib.import_module(VERBS[words[0]][0]).main
    try:
        with contextlib.redirect_stdout(printed):
            main([*words[1:], "--help"])
    except SystemExit as leaving:
        return "" if leaving.code else printed.getvalue()
    except ValueError:
        return ""
    finally:
        if columns is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = columns
    return printed.getvalue()


def _fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def config_page(modules: list[Module], names: Names) -> str:
    """Every field of a config with what it may be, what it is and what it means.

    Raises:
      ValueError: for a field that its section's docstring does not explain.
    """
    blocks = [
        "# Configs",
        "A run is a `ConfigDict` of these sections. Any field is an option of verbs that take a config: "
        "`--config.SECTION.FIELD=VALUE`. Values are those of `zaya_jax.config`; the presets in `configs/` "
        "set their own. Which values go together is checked before anything is compiled.",
    ]
    blocks[1] = linked(blocks[1], names)
    sections = [
        (module, name, node, parse(raw))
        for module in modules
        if module.room == "zaya_jax.config"
        for name, node, raw in public(module.tree.body)
        if isinstance(node, ast.ClassDef) and (name == "Config" or _SECTION.match(name))
    ]
    # As options name them: of the sections, the fields of Config whose types they are.
    prefixes = {"Config": ""} | {
        ast.unparse(definition.annotation): f"{field}."
        for _, name, node, _ in sections
        if name == "Config"
        for field, definition, _ in public(node.body)
        if isinstance(definition, ast.AnnAssign)
    }
    for module, name, node, docstring in sorted(sections, key=lambda each: each[1] != "Config"):
        explained = docstring.entries("Attributes")
        blocks += [f"## {name}", linked(docstring.text, names, module.name)]
        for field, definition, _ in public(node.body):
            if not isinstance(definition, ast.AnnAssign):
                continue
            if field not in explained:
                raise ValueError(
                    f"{module.name}.{name}.{field} is not explained; its class's Attributes must say it"
                )
            text = linked(explained[field], names, module.name)
            blocks.append(f"**{prefixes.get(name, '')}{field}**: {text}  \n{_kind(definition)}")
    return "\n\n".join(blocks) + "\n"


def _kind(node: ast.AnnAssign) -> str:
    """The type of a field, which is a link if it is a section, and its default."""
    text = ast.unparse(node.annotation)
    section = re.search(r"\b[A-Z]\w*Config\b", text)
    return (f"[`{text}`](#{section[0].lower()})" if section else f"`{text}`") + _default(node)


def _default(node: ast.AnnAssign) -> str:
    if node.value is None:
        return ", must be given"
    if isinstance(node.value, ast.Call):
        return ""
    return f", by default `{ast.unparse(node.value)}`"
