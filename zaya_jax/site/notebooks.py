"""A page for each notebook: its prose, its code, and what it put out if it has been run."""

import base64
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from zaya_jax.site.names import root

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CELL_SECONDS = 600


def notebook_files() -> list[pathlib.Path]:
    """Those of the checkout, as percent scripts."""
    return sorted((root() / "notebooks").glob("*.py"))


def write_notebook(file: pathlib.Path, folder: pathlib.Path, *, executed: pathlib.Path | None) -> None:
    """Writes a notebook's page and its pictures.

    Args:
      file: of the notebook, as a percent script.
      folder: of the pages.
      executed: that of notebooks that were run, NAME.ipynb each; others are shown without outputs.
    """
    import jupytext

    done = executed and executed / f"{file.stem}.ipynb"
    notebook = jupytext.read(done if done and done.is_file() else file)
    pictures = Pictures(folder, file.stem)
    blocks = [block for cell in notebook.cells for block in _cell(cell, pictures)]
    blocks.insert(1, _about(file, has_output=any(cell.get("outputs") for cell in notebook.cells)))
    (folder / f"{file.stem}.md").write_text("\n\n".join(blocks) + "\n", encoding="utf-8")


def run_notebook(file: pathlib.Path, folder: pathlib.Path) -> None:
    """Runs a notebook from top to bottom, in a kernel of this Python, and keeps it with its outputs."""
    import jupytext
    import nbclient

    notebook = jupytext.read(file)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=CELL_SECONDS, resources=resources
    ).execute()
    jupytext.write(notebook, folder / f"{file.stem}.ipynb")


class Pictures:
    """The pictures of a notebook, as files beside its page."""

    def __init__(self, folder: pathlib.Path, name: str):
        self._folder, self._name, self._count = folder, name, 0

    def write(self, encoded: str) -> str:
        """Writes a PNG and gives its file's name."""
        self._count += 1
        file = self._folder / f"{self._name}_{self._count}.png"
        file.write_bytes(base64.b64decode(encoded))
        return file.name


def _about(file: pathlib.Path, *, has_output: bool) -> str:
    how = "" if has_output else " It was not run for this page, which shows no outputs."
    return f"This is `notebooks/{file.name}`, a notebook as text.{how}"


def _cell(cell: Any, pictures: Pictures) -> Iterator[str]:
    if cell.cell_type == "markdown":
        yield cell.source
        return
    if not cell.source.strip():
        return
    yield _fenced("python", cell.source)
    for output in cell.get("outputs", ()):
        yield from _output(output, pictures)


def _output(output: Any, pictures: Pictures) -> Iterator[str]:
    if output.get("name") == "stderr":  # what libraries say of the machine
        return
    data = output.get("data", {})
    if "image/png" in data:
        # The file's own words stand around it: a picture of a cell has no other.
        yield f"![picture {pictures._count + 1} of this notebook]({pictures.write(data['image/png'])})"
    elif text := _COLOURS.sub("", output.get("text") or data.get("text/plain", "")):
        yield _fenced("text", text.rstrip("\n"))


def _fenced(language: str, text: str) -> str:
    return f"````{language}\n{text}\n````"
