"""Completion scripts in bash, zsh and fish; their words are those of the argparse parsers."""

import importlib
import os
import pathlib
import shutil
import subprocess
import time

import pytest
from test_command_line import run

from zaya_jax import cli
from zaya_jax.completion.words import FILE, FOLDER, UNLISTED, commands, fields
from zaya_jax.config import Config
from zaya_jax.fields import field_paths
from zaya_jax.options import parser_of

# bash passes the words of the line, which it also splits at "=" and ":", and the position of the cursor.
ASK = """
source "$1"
shift
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
_zaya
printf '%s\\n' "${COMPREPLY[@]}"
"""
CASES = [
    ("zaya ", set(cli.COMMANDS)),
    ("zaya tr", {"train"}),
    ("zaya --v", {"--version"}),
    ("zaya ckpt ", {"ls", "verify", "diff", "prune", "reshape", "average"}),
    ("zaya ckpt diff --tr", {"--training"}),
    ("zaya ckpt nothing --", {"--help"}),
    ("zaya convert insp", {"inspect"}),
    ("zaya train --over", {"--overwrite"}),
    ("zaya train --config.opt", {"--config.optimizer."}),
    ("zaya train --config.data.batch", {"--config.data.batch_size=", "--config.data.batch_ramp="}),
    ("zaya train --config.optimizer.name = ", {"muon", "adamw"}),
    ("zaya train --config.optimizer.name = a", {"adamw"}),
    ("zaya train --config.train.keep_best = T", {"True"}),
    ("zaya train --config.model.hidden_size = ", set()),
    ("zaya train --config = a_f", {"a_folder"}),
    ("zaya train --config f", {"file of mine.py"}),
    ("zaya train --wait 3 --dry", {"--dry-run"}),
    ("zaya plan --config = x.py kern", {"kernels"}),
    ("zaya supervise --engine ", {"local", "slurm"}),
    ("zaya supervise --engine = s", {"slurm"}),
    ("zaya launch --processes = 2 -- tr", {"train"}),
    ("zaya launch --processes 2 -- train --change", {"--change-course"}),
    ("zaya report a_folder a_", {"a_folder"}),
    ("zaya report f", set()),  # a run is a folder
    ("zaya data inspect --split ", {"train", "validation"}),
    ("zaya completion ", {"bash", "zsh", "fish"}),
]  # fmt: skip


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The scripts for all shells, printed once because this imports every command."""
    root = tmp_path_factory.mktemp("scripts")
    for shell in ("bash", "zsh", "fish"):
        code, out, err = run(f"completion {shell}")
        assert (code, err) == (0, "")
        (root / shell).write_text(out)
    (root / "here/a_folder").mkdir(parents=True)
    (root / "here/file of mine.py").write_text("")
    return root


@pytest.mark.parametrize(
    ("line", "answers"), CASES, ids=lambda value: value if isinstance(value, str) else ""
)
def test_bash_completes(line, answers, scripts):
    words = line.split(" ")
    if words[-2:] == ["=", ""]:
        words.pop()  # the cursor is at the "=" itself
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "ask", scripts / "bash", *words],
        cwd=scripts / "here",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert set(done.stdout.splitlines()) - {""} == answers


def test_completion_starts_no_program(scripts):
    """Completion starts no other program: it works with an empty PATH, in less than 200 ms."""
    began = time.monotonic()
    done = subprocess.run(
        [
            "bash",
            "--norc",
            "-c",
            f"PATH=/nowhere\n{ASK}",
            "ask",
            scripts / "bash",
            "zaya",
            "train",
            "--config.",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    took = time.monotonic() - began
    assert done.stderr == ""
    assert "--config.model." in done.stdout
    assert took < 10  # generous for a loaded machine; starting bash takes 10 ms


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_scripts_have_no_syntax_errors(shell, scripts):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    done = subprocess.run([shell, "-n", scripts / shell], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("line", "answers"),
    [
        ("zaya tr", {"train"}),
        ("zaya ckpt d", {"diff"}),
        ("zaya train --config.optimizer.name=", {f"--config.optimizer.name={n}" for n in ("muon", "adamw")}),
        ("zaya supervise --engine ", {"local", "slurm"}),
        ("zaya supervise --engine local -- tr", {"train"}),
        ("zaya report a_", {"a_folder/"}),
    ],
)
def test_fish_completes(line, answers, scripts):
    if shutil.which("fish") is None:
        pytest.skip("no fish here")
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source '{scripts}/fish'; complete -C '{line}'"],
        cwd=scripts / "here",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert {each.partition("\t")[0] for each in done.stdout.splitlines()} == answers


def test_zsh_completes(scripts):
    """In a pseudo-terminal: the content of the line after the tab key."""
    if shutil.which("zsh") is None:
        pytest.skip("no zsh here")
    script = pathlib.Path(__file__).with_name("complete_in_zsh.zsh")
    lines = {
        "zaya train --config.optimizer.nam": "zaya train --config.optimizer.name=",
        "zaya train --config.optimizer.name=ad": "zaya train --config.optimizer.name=adamw ",
        "zaya launch -- train --overw": "zaya launch -- train --overwrite ",
        "zaya ckpt prun": "zaya ckpt prune ",
        "zaya train --config=fil": "zaya train --config=file\\ of\\ mine.py ",
    }
    done = subprocess.run(
        ["zsh", "-f", script, scripts / "zsh", *lines],
        cwd=scripts / "here",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [f"<{line}>" for line in lines.values()], done.stderr


def test_a_line_of_bash_is_typed_and_completed(scripts):
    """The complete path through readline: typed keys, a tab, and the resulting line."""
    typed = f'source {scripts}/bash; zaya() {{ echo "got: $*"; }}\n'
    typed += "zaya train --config.optimizer.nam\tad\t\nexit\n"
    done = subprocess.run(
        ["script", "-qec", "bash --norc -i", "/dev/null"],
        input=typed, cwd=scripts, env={"PATH": os.environ["PATH"], "HOME": str(scripts), "TERM": "dumb"},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "got: train --config.optimizer.name=adamw" in done.stdout


def test_words_are_those_of_the_parsers():
    by_path = {command.path: command for command in commands()}
    assert set(by_path) > {"", *cli.COMMANDS, "ckpt ls", "data build", "bench gemm", "aegis status"}
    assert all(f"{name} {word}" in by_path for name, words in UNLISTED.items() for word in words)
    train = by_path["train"]
    options = {name: option for option in train.options for name in option.names}
    assert train.has_fields
    assert options["--config"].values == (FILE,)
    assert options["--overwrite"].values == ()
    assert by_path["generate"].operands == (FOLDER,)
    assert not by_path["generate"].has_fields
    assert set(fields()) == set(field_paths(Config))
    assert fields()["execution.implementation"][-1] == "None"


def test_help_fits_80_columns(monkeypatch):
    """All help except examples, which are copied in one piece, and words longer than a line."""
    monkeypatch.setenv("COLUMNS", "80")
    wide = {}
    for command in commands():
        if not command.path:
            continue
        name, *inner = command.path.split()
        command_main = importlib.import_module(cli.COMMANDS[name][0]).main
        text = parser_of(command_main, *inner).format_help().partition("\nexamples:\n")[0]
        lines = [line for line in text.splitlines() if len(line) > 80 and len(line.split()) > 1]
        if lines:
            wide[command.path] = lines
    assert not wide
