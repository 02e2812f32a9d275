"""`zaya VERB`: each verb is a `main` in its room."""

import contextlib
import importlib
import os
import pathlib
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

from zaya_jax.fields import did_you_mean
from zaya_jax.parallel.failures import Diverged, Late, Lost, Shared
from zaya_jax.platform.versions import package_version
from zaya_jax.verbs import VERBS

MISTAKE, DAMAGE, REQUEUE, DIVERGED, LATE = 2, 65, 75, 76, 124
"""What the user can mend; sysexits.h's EX_DATAERR and EX_TEMPFAIL; one of ours; as coreutils' `timeout`."""


def run() -> None:
    """`main`, and the end of a process of its own, which no signal cuts short."""
    try:
        main()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, _ignore_once)


def _ignore_once(number: int, frame: FrameType | None) -> None:
    """For what comes behind the last line of ours: all is done, and jax parts from the other processes.

    An exception there would leave that half done, and end this process and the others by abort.
    """
    del frame
    signal.signal(number, lambda number, _: os._exit(128 + number))


def main(argv: list[str] | None = None) -> None:
    """Runs a verb.

    Exit codes: 0 done; 2 the user can mend it (one sentence); 3 the answer is no (`zaya ckpt verify` found
    damage, `zaya ckpt diff` a difference); 1 a bug (a traceback); 65 a corpus or a checkpoint is not what was
    written, and there is none before it (one sentence); 75 the same command goes on, for it was asked to stop
    or lost another process; 76 devices hold other numbers than the rest, and the same command goes on, better
    without them; 124 a process did not come in time, or the run stood still; 130 interrupted; 141
    nobody reads on, as of `zaya --help | head -1`.
    """
    arguments = sys.argv[1:] if argv is None else argv
    verb = arguments[0] if arguments and arguments[0] not in ("-h", "--help") else None
    # Ctrl-C raises by itself; a scheduler's word is to leave by a code that says so too. A run listens
    # otherwise, once it has a step to save.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(REQUEUE))
    try:
        with _printing():
            if verb is None:
                print(_usage())
            elif verb == "--version":
                print(_versions())
            elif verb not in VERBS:
                hint = did_you_mean(verb, (*VERBS, "--help", "--version")) or f"known are {', '.join(VERBS)}"
                sys.exit(_complain(f'there is no verb "{verb}"; {hint}'))
            else:
                importlib.import_module(VERBS[verb][0]).main(arguments[1:])
    except BrokenPipeError:  # of standard output: nothing here writes to other pipes
        _forget_output()
        sys.exit(141)
    except OSError as error:
        sys.exit(_complain(_about(verb, _describe(error))))
    except Shared as error:
        if error.is_told_here:
            _complain(_about(verb, str(error)))
        sys.exit(_code_of(error))
    except (Late, Lost, Diverged) as error:
        _complain(_about(verb, str(error)))
        sys.exit(LATE if isinstance(error, Late) else REQUEUE if isinstance(error, Lost) else DIVERGED)
    except ValueError as error:
        if not _is_ours(error):
            raise
        _complain(_about(verb, str(error)))
        sys.exit(_code_of(error))
    except KeyboardInterrupt:
        sys.exit(130)


@contextlib.contextmanager
def _printing() -> Iterator[None]:
    """Waits until all that was printed is out: at its own exit Python has no sentence for a failure."""
    try:
        yield
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):  # rich makes it an exit code of its own
            raise leaving.__context__ from None
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _describe(error: OSError) -> str:
    """A failure of the system as a sentence: where, why, and what our code has to add."""
    where = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    if not where and _output_fails():
        where = "standard output"
    cause = error.strerror or str(error) or type(error).__name__
    return "; ".join([f"{where}: {cause}" if where else cause, *getattr(error, "__notes__", ())])


def _output_fails() -> bool:
    """Whether standard output takes no more; what is left for it is given up then."""
    try:
        sys.stdout.flush()
    except OSError:
        _forget_output()
        return True
    return False


def _forget_output() -> None:
    """Gives what is left for standard output to nobody, or Python would complain of it at its exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage() -> str:
    verbs = "\n".join(f"  {verb:<11}{summary}" for verb, (_, summary) in VERBS.items())
    return (
        "usage: zaya VERB [options]\n\n"
        f"{verbs}\n\n"
        "zaya VERB --help has the options of each, with examples. To begin with:\n"
        "  zaya train\n"
        '  zaya generate runs/tiny --prompt "def main"\n\n'
        f"zaya --version: {_versions()}"
    )


def _versions() -> str:
    return ", ".join(f"{package} {package_version(package)}" for package in ("zaya_jax", "jax"))


def _complain(sentence: str) -> int:
    print(f"zaya: {sentence}", file=sys.stderr)
    return MISTAKE


def _about(verb: str | None, sentence: str) -> str:
    return f"{verb}: {sentence}" if verb else sentence


def _code_of(error: ValueError) -> int:
    return DAMAGE if getattr(error, "is_damage", False) else MISTAKE


def _is_ours(error: ValueError) -> bool:
    """Whether our own code raised it, as a sentence for the user; a library's is a bug of ours."""
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    package = pathlib.Path(__file__).resolve().parent
    return raised_in.is_relative_to(package) or raised_in.is_relative_to(package.parent / "pallas_kernels")


if __name__ == "__main__":
    run()
