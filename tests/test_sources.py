"""Whatever a comment cites is in the list of sources, by a tag and a place that a reader can open."""

import ast
import io
import pathlib
import re
import tokenize

import pytest

import zaya_jax

ROOT = pathlib.Path(__file__).parents[1]
LIST = pathlib.Path(zaya_jax.__file__).parent / "SOURCES.md"
FOLDERS = ("zaya_jax", "pallas_kernels", "configs", "tests", "notebooks")
ROW = re.compile(r"^\| \[([\w-]+)\] \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
TAG = re.compile(r"(?<![\w\])])\[([A-Z][\w-]+|legacy)\](?!\()")
ARXIV = re.compile(r"arXiv\s+(\d{4}\.\d{4,5})\b")
NOTES = re.compile(r"\bfacts,? (?:\d|reliability)|\[8B\]|\[BASE\]", re.IGNORECASE)
"""Names of what its authors had and a reader has not."""


def sources() -> dict[str, str]:
    """Tags, and where each source is."""
    return {tag: where for tag, _, where, _ in ROW.findall(LIST.read_text())}


def files() -> list[pathlib.Path]:
    found = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return [file for file in found if file != pathlib.Path(__file__)]


def prose(file: pathlib.Path) -> str:
    """Comments and all strings that stand alone, as docstrings do; brackets of code are no citations."""
    text = file.read_text()
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    alone = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    strings = [node.value for node in alone if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*comments, *strings])


def test_each_source_is_listed_once_with_a_place():
    tags = [tag for tag, *_ in ROW.findall(LIST.read_text())]
    assert len(tags) == len(set(tags)) == LIST.read_text().count("\n| [")
    places = [where for where in sources().values() if not ARXIV.search(where)]
    assert all("github.com/" in where or "huggingface.co/" in where for where in places)


@pytest.mark.parametrize("file", files(), ids=lambda file: str(file.relative_to(ROOT)))
def test_what_is_cited_is_in_the_list(file):
    text = prose(file)
    assert set(TAG.findall(text)) <= set(sources())
    assert set(ARXIV.findall(text)) <= set(ARXIV.findall(LIST.read_text()))


def test_every_source_is_cited():
    cited = {tag for file in files() for tag in TAG.findall(prose(file))}
    assert set(sources()) <= cited


def test_nobody_cites_notes_that_a_reader_has_not():
    texts = [*files(), *ROOT.glob("*.md"), LIST]
    found = {str(file.relative_to(ROOT)): NOTES.findall(file.read_text()) for file in texts}
    assert not {file: notes for file, notes in found.items() if notes}


def test_citations_are_found_where_they_stand(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Eq. 6 of [One-1]."""\nx: list[Any] = [NONE]  # [Two], not [README](there)\n"""[legacy]."""\n'
    )
    assert TAG.findall(prose(file)) == ["Two", "One-1", "legacy"]
