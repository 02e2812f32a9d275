"""Which errors a command reports in one sentence, and with which exit code it ends."""

import importlib
import sys
import types

import pytest

from pallas_kernels.errors import ArgumentError
from zaya_jax import cli, errors
from zaya_jax.errors import DamagedError, UserError, exit_code_of
from zaya_jax.parallel.processes.errors import CollectiveError, Diverged, PeerLost, PeerTimeout


def convert_in_our_code():
    """A ValueError of Python whose last traceback frame is in the package."""
    exec(compile("int('x')", cli.__file__, "exec"))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("wrong"), 2),
        (ArgumentError("wrong"), 2),
        (FileNotFoundError(2, "No such file or directory", "x"), 2),
        (OSError(28, "No space left on device"), 2),
        (DamagedError("damaged"), 65),
        (CollectiveError("wrong", is_printed_here=True), 2),
        (CollectiveError("damaged", is_printed_here=True, is_damage=True), 65),
        (PeerLost("gone"), 75),
        (Diverged("differ", ()), 76),
        (PeerTimeout("late"), 124),
        (ValueError("x"), None),
        (KeyError("x"), None),
        (TypeError("x"), None),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "x"), None),
    ],
)
def test_each_error_has_one_exit_code(error, code):
    assert exit_code_of(error) == code


@pytest.fixture
def failing_command(monkeypatch):
    """Replaces `zaya doctor` by a function that raises what a test wants."""

    def fail_with(function):
        module = types.ModuleType("failing_command")
        module.main = lambda arguments: function()
        monkeypatch.setitem(sys.modules, "failing_command", module)
        monkeypatch.setitem(cli.COMMANDS, "doctor", ("failing_command", "fails"))
        assert importlib.import_module("failing_command") is module

    return fail_with


def raising(error):
    def function():
        raise error

    return function


def test_a_user_error_is_one_sentence(failing_command, capsys):
    failing_command(raising(UserError("data.seed is -1; it must be at least 0")))
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == errors.USER_ERROR
    assert capsys.readouterr().err == "zaya: doctor: data.seed is -1; it must be at least 0\n"


@pytest.mark.parametrize("bug", [convert_in_our_code, raising(ValueError("of a library")), lambda: {}["x"]])
def test_a_bug_keeps_its_traceback_wherever_it_is_raised(failing_command, bug, capsys):
    failing_command(bug)
    with pytest.raises((ValueError, KeyError)):
        cli.main(["doctor"])
    assert not capsys.readouterr().err


def test_an_error_that_another_process_reports_is_not_printed_here(failing_command, capsys):
    failing_command(raising(CollectiveError("no space left", is_printed_here=False)))
    with pytest.raises(SystemExit) as ended:
        cli.main(["doctor"])
    assert ended.value.code == errors.USER_ERROR
    assert not capsys.readouterr().err
