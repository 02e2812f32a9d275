"""The documentation website: generated pages, links of names in backticks, and that broken links are errors.

`.ci/run` builds the whole website; these tests build small ones.
"""

import dataclasses
import pathlib
import re

import pytest

from zaya_jax.commands.registry import COMMANDS
from zaya_jax.config import DataConfig, OptimizerConfig, TrainConfig, WatchConfig
from zaya_jax.errors import UserError
from zaya_jax.site.build import ROOT, build, collect_pages, run_sphinx
from zaya_jax.site.reference import config_page

DOCSTRING_PAGE = "```{eval-rst}\n.. automodule:: zaya_jax.errors\n   :members:\n```"


def test_every_config_field_has_an_entry():
    page = config_page()
    entry = r"^\*\*optimizer\.learning_rate\*\*: .+  \n`a finite number`, default `0\.0006`$"
    assert re.search(entry, page, re.MULTILINE)
    fields = {
        field.name
        for section in (TrainConfig, DataConfig, OptimizerConfig, WatchConfig)
        for field in dataclasses.fields(section)
    }
    assert fields <= set(re.findall(r"^\*\*(?:\w+\.)*(\w+)\*\*: \S", page, re.MULTILINE))


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> pathlib.Path:
    pytest.importorskip("jupytext")
    folder = tmp_path_factory.mktemp("site") / "pages"
    collect_pages(folder)
    return folder


def test_every_command_has_a_section(pages):
    text = (pages / "docs/reference/all_commands.md").read_text()
    assert all(f"## zaya {command}\n" in text for command in COMMANDS)
    assert {"### zaya data build", "### zaya plan failures", "### zaya aegis drill"} <= set(text.splitlines())


def test_each_page_of_docs_is_collected_with_its_relative_links(pages):
    for page in (ROOT / "docs").rglob("*.md"):
        assert (pages / page.relative_to(ROOT)).is_file()
    assert "(../notebooks/tour.ipynb)" in (pages / "docs/README.md").read_text()
    assert {file.stem for file in (pages / "notebooks").glob("*.ipynb")} == {
        file.stem for file in (ROOT / "notebooks").glob("*.py")
    }


def test_links_of_the_markdown_pages_exist_in_the_repository():
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    missing = [
        f"{file}: {target}"
        for file in files
        for target in re.findall(r"\]\(([^)#:\s]+)", file.read_text(encoding="utf-8"))
        if target not in ("http", "https") and not (file.parent / target).exists()
    ]
    assert not missing


def _small_site(folder: pathlib.Path, text: str) -> pathlib.Path:
    pages = folder / "pages"
    pages.mkdir()
    (pages / "index.md").write_text(f"# Index\n\n{text}\n\n```{{toctree}}\nother\n```\n")
    (pages / "other.md").write_text(f"# Other\n\n{DOCSTRING_PAGE}\n")
    return pages


def run_small(folder: pathlib.Path, text: str) -> str:
    """HTML of a page, in a site that documents `zaya_jax.errors` only."""
    pytest.importorskip("myst_nb")
    run_sphinx(_small_site(folder, text), folder / "html", api=False)
    return (folder / "html/index.html").read_text()


def test_names_in_backticks_become_links_and_other_code_does_not(tmp_path):
    html = run_small(tmp_path, "`zaya_jax.errors.UserError`, `numpy.array`, [there](other.md)")
    assert 'href="other.html#zaya_jax.errors.UserError"><code' in html
    assert re.search(r"(?<!>)<code[^>]*><span class=\"pre\">numpy.array", html)
    assert 'href="other.html"' in html
    assert "exit_code" in (tmp_path / "html/other.html").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("`zaya_jax.errors.NoError`", "no page documents `zaya_jax.errors.NoError`"),
        ("[nowhere](nowhere.md)", "nowhere"),
        ("[no heading](other.md#nowhere)", "nowhere"),
    ],
    ids=["name", "page", "heading"],
)
def test_what_leads_nowhere_is_an_error(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        run_small(tmp_path, text)


def test_a_folder_with_other_files_is_not_replaced(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(UserError, match="holds files that are not a website"):
        build(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"
