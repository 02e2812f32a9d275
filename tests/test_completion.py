"""Shells complete `zaya` by the scripts that it prints: asked as a user's key asks them, without a Python."""

import functools
import importlib
import os
import pathlib
import shutil
import subprocess

import pytest

from zaya_jax import cli
from zaya_jax.completion_command import SCRIPTS, places
from zaya_jax.config_help import field_helps
from zaya_jax.options import parser_of
from zaya_jax.verbs import VERBS

ASK_BASH = """
source "$SCRIPT"
COMP_LINE="$LINE" COMP_POINT=${#LINE}
# As readline cuts a line: at blanks, and at what COMP_WORDBREAKS has beside them.
COMP_WORDBREAKS="${BREAKS-$COMP_WORDBREAKS}"
_zaya
printf '%s\\n' "${COMPREPLY[@]}"
"""
# compgen as bashcompinit calls it, without the line editor around it.
ASK_ZSH = """
source "$SCRIPT"
words=(${(s. .)LINE})
[[ "$LINE" == *" " ]] && words+=("")
COMP_LINE="$LINE" COMP_POINT=${#LINE}
COMPREPLY=()
_zaya
# What the line editor does with them: its own compgen leaves that to it.
print -rl -- ${(M)COMPREPLY:#${(b)words[-1]}*}
"""


@functools.cache
def script(shell: str, folder: pathlib.Path) -> pathlib.Path:
    path = folder / f"zaya.{shell}"
    path.write_text(SCRIPTS[shell](all_places()))
    return path


@functools.cache
def all_places():
    return list(places())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("shells")
    (made / "runs/tiny").mkdir(parents=True)
    (made / "runs/two words").mkdir()
    (made / "own.py").write_text("")
    return made


def asked(shell: str, line: str, folder: pathlib.Path, **environment: str) -> list[str]:
    """What a shell proposes behind a line."""
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    words = {
        "bash": ["bash", "--norc", "-c", ASK_BASH],
        "zsh": ["zsh", "-f", "-c", ASK_ZSH],
        "fish": ["fish", "--no-config", "-c", "source $SCRIPT; complete -C $LINE"],
    }[shell]
    given = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "SCRIPT": str(script(shell, folder)),
        "LINE": line,
    }
    done = subprocess.run(
        words, cwd=folder, env=given | environment, capture_output=True, text=True, timeout=60
    )
    assert not done.stderr
    return sorted({text.split("\t")[0] for text in done.stdout.splitlines() if text})


CASES = (
    ("zaya tr", ["train"]),
    ("zaya data ver", ["verify"]),
    ("zaya train --dry", ["--dry-run"]),
    ("zaya ckpt reshape a b --dt", ["--dtype"]),
    ("zaya ckpt reshape a b --dtype b", ["bfloat16"]),
    ("zaya report runs/ti", ["runs/tiny"]),
    ("zaya generate runs/two", ["runs/two words"]),
)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
@pytest.mark.parametrize(("line", "expected"), CASES)
def test_a_shell_completes(shell, line, expected, folder):
    found = [each.rstrip("/").replace("\\\\", "") for each in asked(shell, line, folder)]
    assert found == expected


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_all_verbs_are_proposed(shell, folder):
    assert set(asked(shell, "zaya ", folder)) >= set(cli.VERBS)


def test_bash_completes_the_values_of_fields(folder):
    """Behind "=" bash takes the rest of the word; the whole word where it is told not to cut there."""
    fields = {field.path: field.choices for field in field_helps()}
    found = asked("bash", "zaya train --config.", folder)
    assert found == sorted(f"--config.{path}=" for path in fields)
    assert asked("bash", "zaya train --config.optimizer.na", folder) == ["--config.optimizer.name="]
    assert asked("bash", "zaya train --config.optimizer.name=", folder) == ["adamw", "muon"]
    line = "zaya plan --config.execution.remat=bl"
    assert asked("bash", line, folder) == ["block"]
    assert asked("bash", line, folder, BREAKS=" ") == ["--config.execution.remat=block"]
    assert asked("bash", "zaya train --config=ow", folder) == ["own.py"]
    assert asked("bash", "zaya train --config ow", folder) == ["own.py"]
    assert asked("bash", "zaya train --config.train.num_steps=", folder) == []
    assert not asked("bash", "zaya generate runs/tiny --config.", folder)


def test_zsh_and_fish_complete_the_values_of_fields(folder):
    assert asked("zsh", "zaya train --config.optimizer.name=m", folder) == ["--config.optimizer.name=muon"]
    assert asked("fish", "zaya train --config.optimizer.name=m", folder) == ["--config.optimizer.name=muon"]


def test_each_option_of_each_verb_is_known():
    known = {place.words: {option.name for option in place.options} for place in all_places()}
    assert {words[0] for words in known} == set(cli.VERBS)
    assert "--deduplicate" in known["data", "build"]
    assert "--rules" in known["aegis", "agent"] or len(known["aegis", "agent"]) > 3
    assert all("--help" in options for options in known.values())


def test_a_line_of_bash_is_typed_and_completed(folder):
    """The whole of it, by the keys of a user: readline, a tab, and what then stands on the line."""
    if shutil.which("bash") is None:
        pytest.skip("no bash here")
    typed = f'source {script("bash", folder)}; zaya() {{ echo "got: $*"; }}\n'
    typed += "zaya train --config.optimizer.nam\tad\t\nexit\n"
    done = subprocess.run(
        ["script", "-qec", "bash --norc -i", "/dev/null"],
        input=typed, cwd=folder, env={"PATH": os.environ["PATH"], "HOME": str(folder), "TERM": "dumb"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "got: train --config.optimizer.name=adamw" in done.stdout


@pytest.mark.parametrize("width", [80, 60])
def test_what_verbs_say_of_themselves_fits(width, monkeypatch):
    """All but examples, which are to be copied in one piece, and words that are longer than a line."""
    monkeypatch.setenv("COLUMNS", str(width))
    wide = {}
    for place in all_places():
        verb_main = importlib.import_module(VERBS[place.words[0]][0]).main
        text = parser_of(verb_main, *place.words[1:]).format_help().partition("\nexamples:\n")[0]
        lines = [line for line in text.splitlines() if len(line) > width and len(line.split()) > 1]
        if lines:
            wide[place.words] = lines
    assert not wide
