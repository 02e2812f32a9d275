"""Every public name has a docstring that says more than the name."""

import ast
from collections.abc import Iterator

import pytest
from source_files import python_files

MIN_WORDS = 3


def documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    """Public names of a module or a class with their docstrings, at any depth of classes."""
    assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    yield name, ast.get_docstring(node) or ""
    for inner in node.body if isinstance(node, ast.Module | ast.ClassDef) else ():
        is_named = isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_named and not inner.name.startswith("_"):
            yield from documented(inner, f"{name}.{inner.name}")


def too_short(text: str) -> list[str]:
    """Names whose docstring is missing or too short."""
    pairs = documented(ast.parse(text), "module")
    return [name for name, docstring in pairs if len(docstring.split()) < MIN_WORDS]


def test_public_names_have_a_sentence():
    names = {str(file): too_short(file.read_text(encoding="utf-8")) for file in python_files()}
    assert not {file: each for file, each in names.items() if each}


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"""Five words are a sentence."""\ndef a(): "The part."\ndef _b(): ...', ["module.a"]),
        ("class A:\n  def b(self): ...\n  def _c(self): ...", ["module", "module.A", "module.A.b"]),
        ('"""Nothing that is here is public."""\nclass _A:\n  def b(self): ...', []),
    ],
)
def test_short_and_missing_docstrings_are_reported(text, names):
    assert too_short(text) == names
