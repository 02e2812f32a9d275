"""Writes all pages as Markdown, has Sphinx make HTML of them, and follows every link."""

import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zlib

from zaya_jax.site.api import linked, room_page
from zaya_jax.site.links import check_links
from zaya_jax.site.names import Module, Names, find_names, read_modules, root
from zaya_jax.site.notebooks import notebook_files, run_notebook, write_notebook
from zaya_jax.site.reference import commands_page, config_page

PAGES = pathlib.Path(__file__).parent / "pages"
MOVED = {
    "CONTRIBUTING.md": "contributing.md",
    "zaya_jax/SOURCES.md": "sources.md",
    "LICENSE": "licence.md",
}
"""Files of the checkout that documents link to, and where the site has them."""
_README = re.compile(r"^\{\{README: (.+)\}\}$", re.MULTILINE)
_LINK = re.compile(r"\]\(([^)#:\s]+)\)")
_CONF = """\
project = "zaya_jax"
html_title = "zaya_jax"
extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 2
html_theme = "furo"
html_copy_source = False
html_show_copyright = False
nitpicky = True
# Types in signatures are others' too; links in prose, which are py:obj, are all ours.
nitpick_ignore_regex = [("py:(class|exc|data|meth|attr|func)", ".*")]
suppress_warnings = ["ref.python"]
python_maximum_signature_line_length = 80
toc_object_entries = False
pygments_style = "friendly"
html_static_path = ["site_static"]
html_css_files = ["site.css"]
"""


def build(out: pathlib.Path, *, executed: pathlib.Path | None = None, run_notebooks: bool = False) -> None:
    """Builds the site in a folder, which is then as new.

    Args:
      out: the folder.
      executed: notebooks that were run already, NAME.ipynb each.
      run_notebooks: all that takes less than a minute each, now.

    Raises:
      ValueError: without a checkout around the package, or for a name or a link that leads nowhere.
    """
    if not (root() / "README.md").is_file():
        raise ValueError(f"{root()} is no checkout; the site is built of a checkout's README and notebooks")
    if out.exists() and any(out.iterdir()) and not (out / "objects.inv").is_file():
        raise ValueError(f"{out} has files in it that are no site; it must be empty or a site built before")
    with tempfile.TemporaryDirectory() as scratch:
        pages, html = pathlib.Path(scratch, "pages"), pathlib.Path(scratch, "html")
        if run_notebooks:
            executed = pathlib.Path(scratch, "executed")
            executed.mkdir()
            for file in notebook_files():
                if file.stem != "needle":  # a quarter of an hour; its picture is in the checkout
                    run_notebook(file, executed)
        names = write_pages(pages, executed=executed)
        _sphinx(pages, html)
        problems = [*check_links(html), *_not_shown(html, names)]
        if problems:
            raise ValueError(
                f"{len(problems)} things are not where they should be:\n" + "\n".join(problems[:50])
            )
        shutil.rmtree(out, ignore_errors=True)
        shutil.move(html, out)


def write_pages(folder: pathlib.Path, *, executed: pathlib.Path | None = None) -> Names:
    """Writes the sources of all pages into a new folder, and gives the names that they show."""
    modules = read_modules()
    names = find_names(modules)
    for part in ("api", "notebooks", "site_static"):
        (folder / part).mkdir(parents=True)
    _write_texts(folder, names)
    (folder / "commands.md").write_text(commands_page(), encoding="utf-8")
    (folder / "configs.md").write_text(config_page(modules, names), encoding="utf-8")
    rooms = _write_rooms(folder / "api", modules, names)
    for file in notebook_files():  # the index names them: Sphinx complains of one that it forgot
        write_notebook(file, folder / "notebooks", executed=executed)
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    index = index.replace("{{rooms}}", "\n".join(f"api/{room}" for room in rooms))
    (folder / "index.md").write_text(_whole(index, names), encoding="utf-8")
    (folder / "conf.py").write_text(_CONF, encoding="utf-8")
    shutil.copy(PAGES / "site.css", folder / "site_static")
    return names


def _write_texts(folder: pathlib.Path, names: Names) -> None:
    """The pages that people wrote: ours, and documents of the checkout."""
    for page in PAGES.glob("*.md"):
        text = _whole(page.read_text(encoding="utf-8"), names)
        (folder / page.name).write_text(text, encoding="utf-8")
    documents = {
        "contributing": "CONTRIBUTING.md",
        "changes": "CHANGELOG.md",
        "sources": "zaya_jax/SOURCES.md",
    }
    for page, document in documents.items():
        text = _whole((root() / document).read_text(encoding="utf-8"), names)
        (folder / f"{page}.md").write_text(text, encoding="utf-8")
    licence = (root() / "LICENSE").read_text(encoding="utf-8")
    (folder / "licence.md").write_text(f"# Licence\n\n```text\n{licence}\n```\n", encoding="utf-8")
    readme = (root() / "README.md").read_text(encoding="utf-8")
    for picture in filter(_is_picture, _LINK.findall(readme)):
        shutil.copy(root() / picture, folder)


def _write_rooms(folder: pathlib.Path, modules: list[Module], names: Names) -> list[str]:
    rooms: dict[str, list[Module]] = {}
    for module in modules:
        rooms.setdefault(module.room, []).append(module)
    for room, those in rooms.items():
        (folder / f"{room}.md").write_text(room_page(room, those, names), encoding="utf-8")
    return list(rooms)


def _whole(text: str, names: Names) -> str:
    """A page with the sections of the README that it asks for, and links that lead to where things are."""
    text = _README.sub(lambda found: readme_section(found[1]), text)

    def moved(found: re.Match) -> str:
        target = found[1]
        if _is_picture(target):
            return f"]({pathlib.PurePath(target).name})"
        if target in MOVED:
            return f"]({MOVED[target]})"
        if (PAGES / target).is_file() or target.startswith(("api/", "notebooks/")) or target in OWN_PAGES:
            return found[0]
        raise ValueError(
            f"a page links to {target}, which the site does not have; MOVED could say where it is"
        )

    return linked(_LINK.sub(moved, text), names)


def _is_picture(target: str) -> bool:
    return target.endswith((".png", ".svg")) and (root() / target).is_file()


OWN_PAGES = frozenset({"commands.md", "configs.md", "sources.md", "contributing.md", "changes.md"})
"""Those that are made, which others may link to."""


def readme_section(title: str) -> str:
    """What stands under a heading of the README, up to the next one that is as high; "" is before all.

    Raises:
      ValueError: if there is no such heading.
    """
    text = (root() / "README.md").read_text(encoding="utf-8")
    if title == "Beginning":
        return text.partition("\n## ")[0].partition("\n")[2].strip()
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f'README.md has no heading "## {title}", which a page of the site asks for')
    return found[1].strip()


def _not_shown(html: pathlib.Path, names: Names) -> list[str]:
    """A sentence for each public name that no page has, by the inventory that Sphinx writes."""
    raw = (html / "objects.inv").read_bytes()
    _, packed = raw.split(b"compressed using zlib.\n", 1)
    shown = {line.split(" ")[0] for line in zlib.decompress(packed).decode().splitlines()}
    return [f"no page shows {name}" for name in sorted(names.shown - shown)]


def _sphinx(pages: pathlib.Path, html: pathlib.Path) -> None:
    """Makes HTML; a warning is an error. In a process of its own: Sphinx changes Python's locale and more."""
    words = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-j", "2"]
    done = subprocess.run([*words, str(pages), str(html)], capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.replace(f"{pages}/", "").strip()
        raise ValueError(f"the site is not whole:\n{said}")
    shutil.rmtree(html / ".doctrees", ignore_errors=True)
    (html / ".buildinfo").unlink(missing_ok=True)
