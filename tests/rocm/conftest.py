"""Tests that compile for AMD GPUs, each program in a separate process; no GPU is needed."""

import pathlib
import tempfile

import pytest
import quick_compilation

from zaya_jax.plan.rocm.wheels import find_plugin


@pytest.fixture(scope="session", autouse=True)
def _plugin():
    try:
        find_plugin()
    except ValueError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def _compilers_find_programs_and_leave_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(pathlib.Path(__file__).parent))
    for name in ("XLA_FLAGS", quick_compilation.FOLDER):  # these tests read the code that a cluster runs
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
