"""What comments and docstrings cite is in the list of sources, with a tag and a place to open."""

import re

from source_files import PACKAGE, ROOT, prose, python_files

LIST = PACKAGE / "SOURCES.md"
FILES = [
    file
    for name in ("zaya_jax", "pallas_kernels", "configs", "tests", "notebooks")
    for file in python_files(ROOT / name)
    if file.name != "test_sources.py"
]
ROW = re.compile(r"^\| \[([\w-]+)\] \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
TAG = re.compile(r"(?<![\w\])])\[([A-Z][\w-]+|legacy)\](?!\()")
ARXIV = re.compile(r"arXiv\s+(\d{4}\.\d{4,5})\b")
SITES = ("github.com/", "huggingface.co/", "rocm.blogs.amd.com")
"""Where sources without a number of arXiv are published."""
NOTES = re.compile(r"\bfacts,? (?:\d|reliability)|\[8B\]|\[BASE\]", re.IGNORECASE)
"""Names of notes that readers do not have."""


def sources() -> dict[str, str]:
    """Tags, and the place of each source."""
    return {tag: where for tag, _, where, _ in ROW.findall(LIST.read_text())}


def test_each_source_is_listed_once_with_a_place():
    tags = [tag for tag, *_ in ROW.findall(LIST.read_text())]
    assert len(tags) == len(set(tags)) == LIST.read_text().count("\n| [")
    places = [where for where in sources().values() if not ARXIV.search(where)]
    assert all(any(site in where for site in SITES) for where in places)


def test_citations_and_the_list_agree():
    texts = {file: prose(file) for file in FILES}
    listed, papers = set(sources()), set(ARXIV.findall(LIST.read_text()))
    unknown = {
        str(file): (set(TAG.findall(text)) - listed) | (set(ARXIV.findall(text)) - papers)
        for file, text in texts.items()
    }
    assert not {file: each for file, each in unknown.items() if each}
    assert listed <= {tag for text in texts.values() for tag in TAG.findall(text)}, "a source is never cited"


def test_no_text_cites_notes_that_readers_do_not_have():
    texts = [*FILES, *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), LIST]
    notes = {str(file): NOTES.findall(file.read_text(encoding="utf-8")) for file in texts}
    assert not {file: each for file, each in notes.items() if each}


def test_citations_are_recognized(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        '"""Eq. 6 of [One-1]."""\nx: list[Any] = [NONE]  # [Two], not [README](there)\n"""[legacy]."""\n'
    )
    assert TAG.findall(prose(file)) == ["Two", "One-1", "legacy"]
