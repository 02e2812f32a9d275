"""`zaya VERB`: each verb is a `main` in its room."""

import importlib
import importlib.metadata
import pathlib
import sys
import traceback

from zaya_jax.fields import did_you_mean

VERBS = {
    "train": ("zaya_jax.train_command", "train a model, or go on with a run"),
    "generate": ("zaya_jax.inference.command", "continue a prompt with a trained model"),
    "corpus": ("zaya_jax.data.corpus", "build token shards from text files"),
    "convert": ("zaya_jax.convert.command", "weights to and from PyTorch"),
    "plan": ("zaya_jax.plan.command", "size a run: memory, time and communication on a cluster"),
    "bench": ("zaya_jax.bench.command", "measure this machine against others' code and physics"),
}


def main(argv: list[str] | None = None) -> None:
    """Runs a verb. Exit codes: 0 done, 2 the user can mend it (one sentence), 1 a bug (a traceback)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return
    if arguments[0] == "--version":
        print(_versions())
        return
    verb = arguments[0]
    if verb not in VERBS:
        hint = did_you_mean(verb, (*VERBS, "--help", "--version")) or f"known are {', '.join(VERBS)}"
        sys.exit(_complain(f'there is no verb "{verb}"; {hint}'))
    module, _ = VERBS[verb]
    try:
        importlib.import_module(module).main(arguments[1:])
    except ValueError as error:
        if not _is_ours(error):
            raise
        sys.exit(_complain(f"{verb}: {error}"))
    except KeyboardInterrupt:
        sys.exit(130)


def _usage() -> str:
    verbs = "\n".join(f"  {verb:<10}{summary}" for verb, (_, summary) in VERBS.items())
    return (
        "usage: zaya VERB [options]\n\n"
        f"{verbs}\n\n"
        "zaya VERB --help has the options of each, with examples. To begin with:\n"
        "  zaya train\n"
        '  zaya generate runs/tiny --prompt "def main"\n\n'
        f"zaya --version: {_versions()}"
    )


def _versions() -> str:
    return ", ".join(f"{package} {_version(package)}" for package in ("zaya_jax", "jax"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # a checkout runs without being installed
        return "(not installed)"


def _complain(sentence: str) -> int:
    print(f"zaya: {sentence}", file=sys.stderr)
    return 2


def _is_ours(error: ValueError) -> bool:
    """Whether our own code raised it, as a sentence for the user; a library's is a bug of ours."""
    raised_in = pathlib.Path(traceback.extract_tb(error.__traceback__)[-1].filename).resolve()
    package = pathlib.Path(__file__).resolve().parent
    return raised_in.is_relative_to(package) or raised_in.is_relative_to(package.parent / "pallas_kernels")


if __name__ == "__main__":
    main()
