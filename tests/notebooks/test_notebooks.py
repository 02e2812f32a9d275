"""Every notebook runs from top to bottom, in a kernel of the Python that runs the tests."""

import os
import pathlib
import sys

import pytest

jupytext = pytest.importorskip("jupytext")
nbclient = pytest.importorskip("nbclient")
pytest.importorskip("ipykernel")
pytest.importorskip("matplotlib")

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.py"))
FEWEST_FIGURES = {
    "cca.py": 4, "chat.py": 2, "cluster.py": 3, "context_extension.py": 2, "convert.py": 1,
    "muon_adamw.py": 3, "needle.py": 1, "router_dynamics.py": 5, "tour.py": 6, "your_own.py": 1,
}  # fmt: skip
NEEDS = {"convert.py": ("torch", "transformers")}
CELL_TIMEOUT_S = 300
TRAINS_LONG = {"needle.py": 3600}
"""Time-outs of notebooks that nobody waits for unasked: they are campaigns."""
EXECUTED = "ZAYA_EXECUTED_NOTEBOOKS"
"""Names the folder, if any, in which notebooks are kept with their outputs: the site shows them."""
OF_KEPT_PROGRAMS = (" cpu_aot_loader.cc:", "before absl::InitializeLog()")
"""What XLA says, on some CPUs, when it reads a program from the tests' folder, and what its first word begins
with. A reader of a notebook has no such folder."""
OF_SHARED_WEIGHTS = " spmd_partitioner.cc:"
"""Where XLA says that, of weights which devices share evenly in a checkpoint, it moves more than it must."""


def test_there_are_notebooks():
    assert set(FEWEST_FIGURES) == {path.name for path in NOTEBOOKS}


def _marked(path: pathlib.Path):
    limit = TRAINS_LONG.get(path.name)
    marks = [] if limit is None else [pytest.mark.campaign, pytest.mark.timeout(limit)]
    return pytest.param(path, marks=marks, id=path.name)


@pytest.mark.parametrize("path", [_marked(path) for path in NOTEBOOKS])
def test_notebook_runs(path, tmp_path, monkeypatch):
    for package in NEEDS.get(path.name, ()):
        pytest.importorskip(package)
    # A kernel that the user registered for another Python must not be taken for ours.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))

    if (
        path.name in TRAINS_LONG
    ):  # as a run is compiled: what the tests' flags save is less than they cost here
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = jupytext.read(path)
    nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=TRAINS_LONG.get(path.name, CELL_TIMEOUT_S),
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()  # raises CellExecutionError, with the traceback, at the first cell that fails

    if folder := os.environ.get(EXECUTED):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        jupytext.write(notebook, pathlib.Path(folder, f"{path.stem}.ipynb"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    said = "".join(output.text for output in outputs if output.get("name") == "stderr").splitlines()
    expected = (*OF_KEPT_PROGRAMS, OF_SHARED_WEIGHTS)
    assert [line for line in said if not any(known in line for known in expected)] == []
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) >= FEWEST_FIGURES[path.name]
