"""The documentation: what is read from docstrings and source, and that nothing leads nowhere unnoticed.

`.ci/run` builds all of it; here are its parts, and a site of two pages.
"""

import ast
import dataclasses
import pathlib
import re

import pytest

from zaya_jax import config as config_room
from zaya_jax.cli import VERBS
from zaya_jax.site import build as site
from zaya_jax.site.api import linked, room_page
from zaya_jax.site.docstrings import parse, to_markdown
from zaya_jax.site.links import check_links
from zaya_jax.site.names import Module, find_names, read_modules
from zaya_jax.site.reference import config_page

DOCSTRING = """Scales what comes in.

    More of it.

    Args:
      x: what comes in, over
        two lines.
      scale: by which.

    Returns:
      The product.

    Raises:
      ValueError: for none.
    """


@pytest.fixture(scope="module")
def modules():
    return read_modules()


@pytest.fixture(scope="module")
def names(modules):
    return find_names(modules)


def test_a_docstring_falls_into_its_parts():
    docstring = parse(DOCSTRING)
    assert docstring.text == "Scales what comes in.\n\nMore of it."
    assert docstring.entries("Args") == {"x": "what comes in, over two lines.", "scale": "by which."}
    markdown = to_markdown(docstring)
    assert "- `x`: what comes in, over two lines.\n- `scale`: by which." in markdown
    assert "**Returns**\n\nThe product." in markdown
    assert "**Args**" not in to_markdown(docstring, leave_out=("Args",))


def test_a_name_is_found_from_where_it_is_named(names):
    cca = "zaya_jax.model.cca"
    assert names.resolve("cca_projection", cca) == f"{cca}.cca_projection"
    assert names.resolve("ModelConfig", cca) == "zaya_jax.config.model.ModelConfig"  # by two imports
    assert (
        names.resolve("zaya_jax.config.ModelConfig.rotary_dim")
        == "zaya_jax.config.model.ModelConfig.rotary_dim"
    )
    assert names.resolve("_project", cca) is None
    assert names.resolve("numpy.array") is None


def test_names_become_links_but_not_in_code(names):
    text = "`zaya_jax.model.cca`, `numpy`\n```python\n`zaya_jax.model.cca`\n```"
    reference = "{py:obj}`zaya_jax.model.cca <zaya_jax.model.cca>`"
    assert linked(text, names) == f"{reference}, `numpy`\n```python\n`zaya_jax.model.cca`\n```"


def test_a_room_shows_functions_classes_and_values(modules, names):
    model = [module for module in modules if module.room == "zaya_jax.model"]
    page = room_page("zaya_jax.model", model, names)
    assert re.search(r"^::::::\{py:function\} cca_projection\(x_BTD: Float\[Array, 'B T D'\], ", page, re.M)
    assert re.search(r"^:::::\{py:method\} __call__", page, re.M) is None
    assert "::::::{py:data} VARIANTS" in page
    assert "{py:attribute} tail_BWC" in page


def test_what_a_class_names_twice_is_shown_once(names):
    text = 'class A:\n  """Of a class.\n\n  Attributes:\n    x: of it.\n    y: also.\n  """\n\n  @property\n'
    module = Module("m", ast.parse(text + '  def x(self) -> int:\n    """The same one."""\n'))
    page = room_page("m", [module], names)
    assert re.findall(r"\{py:(\w+)\} (\S+)", page) == [
        ("module", "m"), ("class", "A"), ("property", "x"), ("attribute", "y"),
    ]  # fmt: skip


def test_every_config_field_is_explained(modules, names):
    page = config_page(modules, names)
    assert "\n**optimizer.learning_rate**: of the warm-up" in page
    sections = [
        each for name in config_room.__all__
        if name.endswith("Config") and dataclasses.is_dataclass(each := getattr(config_room, name))
    ]  # fmt: skip
    assert len(sections) > 8
    for section in sections:
        part = page.partition(f"\n## {section.__name__}\n")[2].partition("\n## ")[0]
        assert set(re.findall(r"^\*\*(?:\w+\.)?(\w+)\*\*: \S", part, re.M)) == {
            field.name for field in dataclasses.fields(section)
        }


def test_every_verb_and_module_has_a_page(tmp_path, modules):
    pytest.importorskip("jupytext")
    pages = tmp_path / "pages"
    names = site.write_pages(pages)
    commands = (pages / "commands.md").read_text()
    assert all(f"## zaya {verb}\n" in commands for verb in VERBS)
    assert "### zaya data build" in commands
    assert "### zaya plan failures" in commands
    assert "### zaya aegis drill" in commands
    text = "".join(file.read_text() for file in (pages / "api").glob("*.md"))
    assert set(re.findall(r"\{py:module\} (\S+)", text)) == {module.name for module in modules}
    assert {module.name for module in modules} <= names.shown
    assert "{{" not in (pages / "index.md").read_text()


def _site(folder: pathlib.Path, text: str) -> pathlib.Path:
    pages = folder / "pages"
    (pages / "site_static").mkdir(parents=True)
    (pages / "conf.py").write_text(site._CONF.replace('["site.css"]', "[]").replace("furo", "basic"))
    (pages / "index.md").write_text(f"# Here\n\n{text}\n\n```{{toctree}}\nother\n```\n")
    (pages / "other.md").write_text("# There\n\n```{py:function} f(x)\n:module: m\n```\n")
    return pages


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{py:obj}`f <m.f>` and [there](other.md)", None),
        ("{py:obj}`g <m.g>`", "m.g"),
        ("[nowhere](nowhere.md)", "nowhere"),
    ],
    ids=["whole", "no such name", "no such page"],
)
def test_what_leads_nowhere_is_an_error(tmp_path, text, said):
    pytest.importorskip("myst_parser")
    pages, html = _site(tmp_path, text), tmp_path / "html"
    if said is None:
        site._sphinx(pages, html)
        assert (html / "index.html").is_file()
    else:
        with pytest.raises(ValueError, match=said):
            site._sphinx(pages, html)


def test_links_of_html_are_followed(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="b.html#there"></a><a href="b.html#gone"></a><a href="c.html"></a><a href="https://x.org/"></a>'
        '<script src="https://x.org/x.js"></script><img src="d.png">'
    )
    (tmp_path / "b.html").write_text('<p id="there"></p>')
    assert [problem.split(",")[0] for problem in check_links(tmp_path)] == [
        "a.html links to b.html#gone",
        "a.html links to c.html",
        "a.html fetches https://x.org/x.js; a page must open without a network",
        "a.html links to d.png",
    ]


def test_a_page_must_not_link_to_what_the_site_has_not(names):
    with pytest.raises(ValueError, match=r"links to tests/x.md, which the site does not have"):
        site._whole("[x](tests/x.md)", names)


def test_a_section_that_the_readme_lost_is_an_error():
    with pytest.raises(ValueError, match='no heading "## Marketing"'):
        site.readme_section("Marketing")


def test_a_folder_of_other_things_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(ValueError, match="has files in it that are no site"):
        site.build(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "the only copy"
