"""`zaya COMMAND`: the entry point, which calls the `main` of a command's module."""

import contextlib
import faulthandler
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from zaya_jax.commands.registry import COMMANDS
from zaya_jax.errors import INTERRUPTED, PIPE_CLOSED, RESUMABLE, USER_ERROR, exit_code_of
from zaya_jax.fields import did_you_mean
from zaya_jax.parallel.processes.errors import CollectiveError
from zaya_jax.platform.compile_thread import leave_compiler
from zaya_jax.platform.garbage_collection import rare_collection
from zaya_jax.platform.shell import zaya_command
from zaya_jax.platform.stop_signals import announce_stop, stop_signals
from zaya_jax.platform.versions import package_version


def run() -> None:
    """Runs `main` as a process, and keeps signals from interrupting its exit."""
    # A crash in native code, as in XLA or a driver, prints where each Python thread was.
    if sys.stderr is not None:
        faulthandler.enable()
    try:
        main()
        # A compiler thread that is still running would abort the process at its exit.
        leave_compiler(0)
    except SystemExit as leaving:
        leave_compiler(leaving.code)
        raise
    finally:
        for number in stop_signals():
            signal.signal(number, signal.SIG_IGN if number == signal.SIGHUP else _ignore_once)


def _leave(number: int, frame: FrameType | None) -> None:
    del number, frame
    announce_stop("")
    sys.exit(RESUMABLE)


def _ignore_once(number: int, frame: FrameType | None) -> None:
    """Ignores a signal while the interpreter exits and jax disconnects from the other processes.

    An exception there would leave the disconnection half done, and abort this process and the others.
    """
    del frame
    signal.signal(number, lambda number, _: os._exit(128 + number))


def main(argv: list[str] | None = None) -> None:
    """Runs a command.

    Exit codes:
      0: success.
      1: a bug, with a traceback.
      2: an error that the user can fix, with a message.
      3: a negative result: `zaya ckpt verify` found damage, or `zaya ckpt diff` a difference.
      65: a corpus or a checkpoint is damaged, and there is no earlier one, with a message.
      75: stopped by a signal, or lost another process; the same command resumes the run.
      76: devices hold diverging values; the same command resumes the run, better without them.
      124: a process did not arrive in time, or the run stalled.
      130: interrupted by Ctrl-C.
      141: the reader of a pipe closed it, as in `zaya --help | head -1`.

    Args:
      argv: arguments after "zaya"; None for those of the process.
    """
    arguments = sys.argv[1:] if argv is None else argv
    command = arguments[0] if arguments and arguments[0] not in ("-h", "--help") else None
    # Stop signals other than SIGINT, as from a scheduler, exit with a code that says that the command can be
    # resumed. A training run replaces these handlers once it has a step to save.
    if threading.current_thread() is threading.main_thread():
        for number in stop_signals():
            # Python's own handler as well: Python does not set it for a command that a script starts in the
            # background, with SIGINT ignored.
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else _leave)
    try:
        with _flushed_output():
            _run_command(command, arguments[1:])
    except BrokenPipeError:  # on standard output: no command writes to another pipe
        _discard_output()
        sys.exit(PIPE_CLOSED)
    except Exception as error:
        code = exit_code_of(error)
        if code is None:  # a bug: Python prints its traceback and exits with 1
            raise
        # Of an error that all processes have, one process prints the message.
        if not isinstance(error, CollectiveError) or error.is_printed_here:
            message = _describe(error) if isinstance(error, OSError) else str(error)
            _print_error(f"{command}: {message}" if command else message)
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _run_command(command: str | None, arguments: list[str]) -> None:
    if command is None:
        print(_usage())
    elif command == "--version":
        print(_versions())
    elif command in COMMANDS:
        # Only the module of the command is imported: `zaya --help` must not wait for jax.
        with rare_collection():
            module = importlib.import_module(COMMANDS[command][0])
        module.main(arguments)
    else:
        hint = did_you_mean(command, (*COMMANDS, "--help", "--version"))
        known = f"known are {', '.join(COMMANDS)}"
        sys.exit(_print_error(f'unknown command "{command}"; {hint or known}'))


@contextlib.contextmanager
def _flushed_output() -> Iterator[None]:
    """Flushes standard output at the end: of a failure at exit, Python prints no clear message."""
    try:
        yield
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich converts it to its own exit code
            raise leaving.__context__ from None
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _describe(error: OSError) -> str:
    """Returns the message of a system error: the path, the reason, and notes that our code added."""
    # A rename has two paths, of which either can be the reason.
    where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    if not where and _output_fails():
        where = "standard output"
    cause = error.strerror or str(error) or type(error).__name__
    return "; ".join([f"{where}: {cause}" if where else cause, *getattr(error, "__notes__", ())])


def _output_fails() -> bool:
    """Returns whether standard output fails; if so, discards what is left for it."""
    try:
        sys.stdout.flush()
    except OSError:
        _discard_output()
        return True
    return False


def _discard_output() -> None:
    """Redirects standard output to /dev/null, or Python would print an error when it flushes it at exit."""
    # The descriptor is replaced, not sys.stdout: libraries may hold the stream object.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage() -> str:
    zaya = zaya_command()
    commands = "\n".join(f"  {name:<11}{summary}" for name, (_, summary) in COMMANDS.items())
    return (
        "usage: zaya COMMAND [options]\n\n"
        f"{commands}\n\n"
        f"{zaya} COMMAND --help shows the options of a command, with examples. To start:\n"
        f"  {zaya} train\n"
        f'  {zaya} generate runs/tiny --prompt "def main("\n\n'
        f"zaya --version: {_versions()}"
    )


def _versions() -> str:
    return ", ".join(f"{package} {package_version(package)}" for package in ("zaya_jax", "jax"))


def _print_error(message: str) -> int:
    print(f"zaya: {message}", file=sys.stderr)
    return USER_ERROR


if __name__ == "__main__":
    run()
