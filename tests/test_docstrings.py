"""Every public name says in a sentence what it is."""

import ast
import pathlib
from collections.abc import Iterator

import pytest

import pallas_kernels
import zaya_jax

FOLDERS = [pathlib.Path(package.__path__[0]) for package in (zaya_jax, pallas_kernels)]
FILES = sorted(file for folder in FOLDERS for file in folder.rglob("*.py"))
FEWEST = 5
"""Words of a docstring. Fewer repeat the name."""


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
    found = documented(ast.parse(text), "module")
    return [name for name, docstring in found if len(docstring.split()) < FEWEST]


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_public_names_have_a_sentence(file):
    assert not too_short(file.read_text())


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('"""Five words are a sentence."""\ndef a(): "Of the part."\ndef _b(): ...', ["module.a"]),
        ("class A:\n  def b(self): ...\n  def _c(self): ...", ["module", "module.A", "module.A.b"]),
        ('"""Nothing that is here is public."""\nclass _A:\n  def b(self): ...', []),
    ],
)
def test_short_and_missing_docstrings_are_found(text, names):
    assert too_short(text) == names
