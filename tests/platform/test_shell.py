"""Suggested commands work when pasted into the shell in which they were printed."""

import pathlib
import re
import shlex
import subprocess
import sys
import tomllib

import pytest

from zaya_jax.platform import shell

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a virtual environment that is not on PATH."""
    for name in ("python", "zaya", "pip"):
        file = tmp_path / ".venv/bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/sh\necho {name} of .venv: $@\n")
        file.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv/bin/python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("typed", "on_path", "expected"),
    [
        (".venv/bin/zaya", False, ".venv/bin/zaya"),
        ("{folder}/.venv/bin/zaya", False, ".venv/bin/zaya"),
        ("{folder}/.venv/bin/zaya", True, "zaya"),  # an activated environment
        ("{folder}/zaya_jax/cli.py", False, ".venv/bin/zaya"),  # python -m zaya_jax.cli
        ("a_program.py", True, "zaya"),
    ],
)
def test_a_suggested_command_starts_this_zaya(typed, on_path, expected, folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", [typed.format(folder=folder)])
    if on_path:
        monkeypatch.setenv("PATH", f"{folder}/.venv/bin:/usr/bin:/bin")
    command = shell.zaya_command()
    assert command == expected
    result = subprocess.run(f"{command} report x", shell=True, capture_output=True, text=True, check=True)
    assert result.stdout == "zaya of .venv: report x\n"


def test_from_another_folder_the_path_is_absolute_and_quoted(folder, tmp_path_factory, monkeypatch):
    spaced = tmp_path_factory.mktemp("with space")
    (folder / ".venv").rename(spaced / ".venv")
    monkeypatch.setattr(sys, "executable", str(spaced / ".venv/bin/python"))
    monkeypatch.setattr(sys, "argv", [str(spaced / ".venv/bin/zaya")])
    result = subprocess.run(f"{shell.zaya_command()} train", shell=True, capture_output=True, text=True)
    assert result.stdout == "zaya of .venv: train\n"


def test_another_zaya_on_the_path_is_not_used(folder, monkeypatch):
    other = folder / "other/zaya"
    other.parent.mkdir()
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(other.parent))
    monkeypatch.setattr(sys, "argv", [".venv/bin/zaya"])
    assert shell.zaya_command() == ".venv/bin/zaya"


def test_without_a_script_the_module_is_run(folder, monkeypatch):
    (folder / ".venv/bin/zaya").unlink()
    (folder / ".venv/bin/pip").unlink()
    monkeypatch.setattr(sys, "argv", ["-m"])
    assert shell.zaya_command() == ".venv/bin/python -m zaya_jax.cli"
    assert shell.pip_install("a>=1", "b") == ".venv/bin/python -m pip install 'a>=1' b"


@pytest.mark.parametrize("extra", ["serve", "data", "eval", "wandb", "trackio", "plan", "kubernetes"])
def test_an_extra_is_installed_by_the_names_of_its_packages(extra, folder):
    """The names are those in pyproject.toml; the command works in any folder, without zaya_jax on PyPI."""
    pip, install, *packages = shlex.split(shell.install_command(extra))
    assert (pip, install) == (".venv/bin/pip", "install")
    wanted = {each.replace("_", "-") for each in EXTRAS[extra]}
    assert {each.replace("_", "-") for each in packages} == wanted


def test_an_extra_that_includes_others_has_their_packages():
    packages = shlex.split(shell.install_command("docs"))[2:]
    assert {"sphinx>=8.2", "jupytext>=1.19", "ipykernel>=6"} <= set(packages)
    assert not [each for each in packages if each.startswith("zaya")]


def test_an_extra_that_the_installation_does_not_know_comes_from_the_checkout(folder):
    assert shell.install_command("of_tomorrow") == ".venv/bin/pip install -e '.[of_tomorrow]'"


def test_the_notebooks_extra_brings_jupyter():
    assert any(re.match(r"jupyterlab\b|notebook\b", each) for each in EXTRAS["notebooks"])


def test_no_text_suggests_to_install_zaya_jax_from_pypi():
    files = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "notebooks").glob("*.py"),
        *(ROOT / "zaya_jax").rglob("*.py"),
    ]
    wrong = [f"{file}: {line}" for file in files for line in file.read_text().splitlines() if _is_wrong(line)]
    assert not wrong
    assert _is_wrong("pip install 'zaya_jax[serve]'")


def _is_wrong(line):
    # The docstring of shell.py mentions this command, to say why it does not work.
    return re.search(r"install '?zaya_jax\b", line) and "would search" not in line
