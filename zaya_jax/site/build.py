"""Collects the pages of the website in a folder and runs Sphinx on it.

The folder mirrors the repository, so that a relative link between Markdown files is right on the repository's
page and on the website.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

from zaya_jax.errors import UserError
from zaya_jax.site.reference import commands_page, config_page

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = ("CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "zaya_jax/SOURCES.md")
FOLDERS = ("docs", "configs", "notebooks")
_NOTEBOOK_LINK = re.compile(r"(notebooks/\w+)\.py\)")
_TOCTREE = """
```{{toctree}}
:caption: {caption}
:hidden:
:glob:

{pages}
```
"""


def build(out: pathlib.Path, *, executed: pathlib.Path | None = None, run_notebooks: bool = False) -> None:
    """Builds the website; replaces one that was built before.

    Args:
      out: folder of the website.
      executed: folder of executed notebooks, NAME.ipynb each; others are shown without outputs.
      run_notebooks: whether to execute the notebooks now, except those that train for minutes.

    Raises:
      UserError: without a checkout around the package, if `out` holds other files, or if Sphinx reports a
        problem such as a link that leads nowhere.
    """
    if not (ROOT / "README.md").is_file():
        raise UserError(
            f"{ROOT} is not a checkout of the repository; the website needs its docs and notebooks"
        )
    # Every website that Sphinx builds has objects.inv. Only such a folder may be replaced.
    if out.exists() and any(out.iterdir()) and not (out / "objects.inv").is_file():
        raise UserError(f"{out} holds files that are not a website; choose an empty folder")
    with tempfile.TemporaryDirectory() as scratch:
        # Built elsewhere first, so that a failure leaves the previous website as it is.
        pages, html = pathlib.Path(scratch, "pages"), pathlib.Path(scratch, "html")
        collect_pages(pages, executed=executed)
        run_sphinx(pages, html, run_notebooks=run_notebooks)
        shutil.rmtree(out, ignore_errors=True)
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(html, out)


def collect_pages(folder: pathlib.Path, *, executed: pathlib.Path | None = None) -> None:
    """Writes the sources of all pages except the API reference, which Sphinx generates, into a new folder."""
    import jupytext

    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.ipynb"))
    for name in DOCUMENTS:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    for script in (folder / "notebooks").glob("*.py"):
        done = executed and executed / f"{script.stem}.ipynb"
        jupytext.write(
            jupytext.read(done if done and done.is_file() else script), script.with_suffix(".ipynb")
        )
        script.unlink()  # both would be pages
    (folder / "docs/reference/all_commands.md").write_text(commands_page(), encoding="utf-8")
    (folder / "docs/reference/all_config_fields.md").write_text(config_page(), encoding="utf-8")
    (folder / "index.md").write_text(_index(), encoding="utf-8")
    for page in (*folder.glob("*.md"), *(folder / "docs").rglob("*.md")):
        text = _NOTEBOOK_LINK.sub(r"\1.ipynb)", page.read_text(encoding="utf-8"))
        # The README is the website's index; that of docs is another page, which stays.
        to_root = "../" * (len(page.relative_to(folder).parts) - 1)
        text = text.replace(f"]({to_root}README.md", f"]({to_root}index.md") if to_root else text
        page.write_text(text, encoding="utf-8")


def _index() -> str:
    """The README, followed by the tables of contents of the website."""
    contents = {
        "Start": ("docs/README", "docs/tutorial"),
        "How-to guides": ("docs/howto/*",),
        "Concepts": ("docs/concepts/*",),
        "Reference": ("docs/reference/*", "docs/validation", "zaya_jax/SOURCES", "CONTRIBUTING", "CHANGELOG"),
        "Notebooks": ("notebooks/*",),
        "Python API": ("api/zaya_jax/zaya_jax", "api/pallas_kernels/pallas_kernels"),
    }
    tables = (_TOCTREE.format(caption=name, pages="\n".join(pages)) for name, pages in contents.items())
    return (ROOT / "README.md").read_text(encoding="utf-8") + "".join(tables)


def run_sphinx(
    pages: pathlib.Path, html: pathlib.Path, *, run_notebooks: bool = False, api: bool = True
) -> None:
    """Builds HTML from pages; each warning is an error.

    Sphinx runs in a separate process because it imports all modules and changes the locale.

    Args:
      pages: folder of the pages; the API reference is generated into it.
      html: output folder.
      run_notebooks: whether to execute notebooks.
      api: whether to generate the API reference.

    Raises:
      UserError: if Sphinx reports a problem.
    """
    settings = pathlib.Path(__file__).parent
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-W", "--keep-going", "-c", str(settings)]
    command += ["-D", "nb_execution_mode=force"] if run_notebooks else []
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "SITE_HAS_API": str(int(api)),
    }
    done = subprocess.run(
        [*command, str(pages), str(html)],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    if done.returncode:
        raise UserError(f"Sphinx reports problems:\n{done.stderr.replace(f'{pages}/', '').strip()}")
    # Caches of Sphinx, which the website does not need.
    shutil.rmtree(html / ".doctrees", ignore_errors=True)
    (html / ".buildinfo").unlink(missing_ok=True)
