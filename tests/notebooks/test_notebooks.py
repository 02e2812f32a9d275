"""Every notebook runs from top to bottom, in a kernel of the Python that runs the tests."""

import ast
import importlib
import importlib.util
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
MIN_FIGURES = {
    "cca.py": 4, "chat.py": 2, "cluster.py": 3, "context_extension.py": 2, "convert.py": 1, "first_run.py": 1,
    "gradient_sum.py": 1, "markovian_rsa.py": 2, "muon_adamw.py": 3,
    "needle.py": 1, "router_dynamics.py": 5, "tour.py": 6, "your_own.py": 1,
}  # fmt: skip
NEEDS = {"convert.py": ("torch", "transformers")}
CELL_TIMEOUT_S = 300
CAMPAIGN_TIMEOUTS_S = {
    "cca.py": 300, "chat.py": 300, "convert.py": 300, "context_extension.py": 600, "first_run.py": 900,
    "markovian_rsa.py": 600, "muon_adamw.py": 600, "needle.py": 3600, "router_dynamics.py": 600,
    "your_own.py": 300,
}  # fmt: skip
"""Timeouts in seconds of the notebooks that train for longest, which only run in campaigns."""
EXECUTED = "ZAYA_EXECUTED_NOTEBOOKS"
"""Environment variable with a folder for the executed notebooks, which the documentation shows."""
CACHE_WARNINGS = (" cpu_aot_loader.cc:", "before absl::InitializeLog()")
"""Warnings that XLA prints on some CPUs when it loads a program from the tests' compilation cache. A user's
notebook has no such cache."""
RESHARDING_WARNING = " spmd_partitioner.cc:"
"""Warning of XLA that restoring sharded weights from a checkpoint moves more data than necessary."""


def test_there_are_notebooks():
    assert set(MIN_FIGURES) == {path.name for path in NOTEBOOKS}


def test_colab_gets_the_text_of_the_first_notebook():
    """Colab opens only .ipynb; `jupytext --to ipynb notebooks/first_run.py` writes it."""
    paths = (ROOT / "notebooks" / f"first_run.{suffix}" for suffix in ("py", "ipynb"))
    text, committed = map(jupytext.read, paths)
    cells = [[(cell.cell_type, cell.source) for cell in notebook.cells] for notebook in (text, committed)]
    assert cells[0] == cells[1]
    assert not any(cell.get("outputs") for cell in committed.cells)
    first = next(cell for cell in committed.cells if cell.cell_type == "code")
    assert '"-m", "pip", "install"' in first.source


def _marked(path: pathlib.Path):
    limit = CAMPAIGN_TIMEOUTS_S.get(path.name)
    marks = [] if limit is None else [pytest.mark.campaign, pytest.mark.timeout(limit)]
    return pytest.param(path, marks=marks, id=path.name)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_imported_names_exist(path):
    """Also in the notebooks that run only in campaigns."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
            ("zaya_jax", "pallas_kernels")
        ):
            module = importlib.import_module(node.module)
            for each in node.names:
                assert hasattr(module, each.name) or importlib.util.find_spec(f"{node.module}.{each.name}")


@pytest.mark.campaign
@pytest.mark.timeout(7200)
def test_the_full_measurement_of_markovian_rsa(tmp_path, monkeypatch):
    """With the same tokens, five rounds beat majority votes; the notebook asserts it."""
    monkeypatch.setenv("ZAYA_FULL_RSA", "1")
    monkeypatch.setitem(CAMPAIGN_TIMEOUTS_S, "markovian_rsa.py", 7200)
    test_notebook_runs(ROOT / "notebooks/markovian_rsa.py", tmp_path, monkeypatch)


@pytest.mark.parametrize("path", [_marked(path) for path in NOTEBOOKS])
def test_notebook_runs(path, tmp_path, monkeypatch):
    for package in NEEDS.get(path.name, ()):
        pytest.importorskip(package)
    # Do not use a kernel that the user registered for another Python.
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("MPLCONFIGDIR", str(tmp_path / "matplotlib"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *sys.path]))

    if (
        path.name in CAMPAIGN_TIMEOUTS_S
    ):  # compiled like a run, because the flags of the tests would save less than they cost here
        monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = jupytext.read(path)
    nbclient.NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CAMPAIGN_TIMEOUTS_S.get(path.name, CELL_TIMEOUT_S),
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()  # raises CellExecutionError, with the traceback, at the first failing cell

    if folder := os.environ.get(EXECUTED):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        jupytext.write(notebook, pathlib.Path(folder, f"{path.stem}.ipynb"))
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    stderr_lines = "".join(output.text for output in outputs if output.get("name") == "stderr").splitlines()
    expected = (*CACHE_WARNINGS, RESHARDING_WARNING)
    assert [line for line in stderr_lines if not any(known in line for known in expected)] == []
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) >= MIN_FIGURES[path.name]
