"""`zaya ckpt`: what the checkpoints of a run are, whether they are whole, and what goes and stays.

It stands beside `cli.py` because it needs rooms that are below the checkpoints' own: what is kept, and
the losses by which the best is known, are a run's.
"""

import argparse
import contextlib
import dataclasses
import datetime
import pathlib
import sys
import time
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Column, Table

from zaya_jax.checkpoint import (
    TRAINING,
    WEIGHTS,
    Comparison,
    Retention,
    SavedStep,
    StoredArrays,
    all_damage,
    all_steps,
    compare,
    folder_bytes,
    has_training,
    newest_step,
    read_about,
    read_config,
    remove_step,
    require_present,
    require_whole,
    reshape,
    rules_by_step,
    run_lock,
    step_folder,
    step_written,
    steps_set_aside,
    steps_to_remove,
)
from zaya_jax.options import Parser
from zaya_jax.tables import format_bytes, name_column, number_column
from zaya_jax.train.metrics import METRICS_FILE, held_out_losses
from zaya_jax.train.saving import retention_of

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
"""Types of weights by their names on the command line."""
ANSWER_IS_NO = 3
"""The exit code when `verify` found damage, or `diff` a difference: answered, and not as one hopes."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya ckpt` with the words behind it.

    Raises:
      ValueError: for a run or a step that is not there, and whatever else cannot be, in one sentence.
    """
    arguments = list(argv or ())
    if arguments and arguments[0] in VERBS:
        VERBS[arguments[0]](arguments[1:])
    else:
        _parser().parse_args(arguments)


def _parser() -> Parser:
    parser = Parser(
        "ckpt",
        "Looks at the checkpoints of a run and changes what is kept of them. `zaya ckpt VERB --help` has the "
        "options of each verb.",
        (
            "zaya ckpt ls runs/tiny                               # what is there, and why it stays",
            "zaya ckpt verify runs/tiny                           # all bytes, against their hashes",
            "zaya ckpt diff runs/tiny:100 runs/tiny:200           # which weights moved, and how far",
            "zaya ckpt prune runs/tiny --keep=1 --dry-run         # what would go",
        ),
    )
    parser.add_argument("verb", metavar="VERB", choices=list(VERBS), help=", ".join(VERBS))
    return parser


# ls


def list_steps(argv: Sequence[str]) -> None:
    """Prints a table of the checkpoints of a run, and what is wrong with them."""
    parser = Parser(
        "ckpt ls",
        "Lists the checkpoints of a run: size, held-out loss, state, and which rules keep each. Quick: names "
        "and sizes of files are held against the manifest, and none is read; `zaya ckpt verify` reads all.",
        ("zaya ckpt ls runs/tiny",),
    )
    _add_run(parser)
    run = parser.parse_args(argv).run
    retention, losses = retention_of(read_config(run)), held_out_losses(run)
    steps, aside = all_steps(run), steps_set_aside(run)
    if not aside:
        require_present(run, [])
    rules = rules_by_step(steps, retention, losses=losses)
    table = Table(
        number_column("step"), Column("written (UTC)", min_width=10), number_column("size"),
        name_column("phase"), number_column("held-out"), name_column("state"), name_column("kept by"),
        title=f"{run}: checkpoints",
    )  # fmt: skip
    damage = {step: next(all_damage(run, step, hashes=False), None) for step in steps}
    for step in steps:
        kept, loss = ", ".join(rules[step]) or "nothing", losses.get(step)
        table.add_row(*_row(run, step, loss=loss, is_whole=damage[step] is None), kept)
    for folder in aside:
        size = format_bytes(folder_bytes(folder))
        table.add_row(folder.name.partition(".")[0], "", size, "", "", "set aside", folder.name)
    Console(soft_wrap=True, highlight=False).print(table)
    for step, sentence in damage.items():
        if sentence is not None:
            print(f"step {step} is damaged: {sentence}")


def _row(run: str, step: int, *, loss: float | None, is_whole: bool) -> tuple[str, ...]:
    """What there is to say of a checkpoint, but for what keeps it."""
    about = read_about(run, step) if is_whole else None
    written = step_written(run, step) if about is None else datetime.datetime.fromisoformat(about.written)
    return (
        str(step),
        f"{written:%Y-%m-%d %H:%M}",
        format_bytes(folder_bytes(step_folder(run, step))),
        "" if about is None else about.phase,
        "" if loss is None else f"{loss:.4f}",
        ("whole" if is_whole else "damaged") + ("" if has_training(run, step) else ", weights only"),
    )


# verify


def verify(argv: Sequence[str]) -> None:
    """Holds every byte of checkpoints against their hashes; leaves with `ANSWER_IS_NO` where one differs."""
    parser = Parser(
        "ckpt verify",
        "Reads all files of a run's checkpoints and holds them against their hashes. Says every file that is "
        f"not as it was written, and from which step a run would go on. Exit code {ANSWER_IS_NO} if any is "
        "damaged.",
        ("zaya ckpt verify runs/tiny", "zaya ckpt verify runs/tiny 100 200"),
    )
    _add_run(parser)
    parser.add_argument("steps", metavar="STEP", type=int, nargs="*", help="of a checkpoint (default: all)")
    options = parser.parse_args(argv)
    require_present(options.run, options.steps)
    steps = options.steps or all_steps(options.run)
    whole = [step for step in steps if _verify_step(options.run, step)]
    if not options.steps:  # a run looks at all of them
        print(f"a run goes on from step {max(whole)}" if whole else "no checkpoint is whole: restore one")
    if len(whole) < len(steps):
        sys.exit(ANSWER_IS_NO)


def _verify_step(run: str, step: int) -> bool:
    """Whether a checkpoint is whole; what is wrong with it is printed."""
    begun, size = time.monotonic(), folder_bytes(step_folder(run, step))
    damage = list(all_damage(run, step))
    speed = size / 1e9 / max(time.monotonic() - begun, 1e-9)
    state = f"damaged, {len(damage)} of its files" if damage else "whole"
    # At once: of large ones, each takes minutes.
    print(f"step {step}: {state} ({format_bytes(size)}, {speed:.2f} GB/s)", flush=True)
    for sentence in damage:
        print(f"  {sentence}", flush=True)
    return not damage


# diff


def diff(argv: Sequence[str]) -> None:
    """Prints how two checkpoints differ; leaves with `ANSWER_IS_NO` where they do."""
    parser = Parser(
        "ckpt diff",
        "Compares the arrays of two checkpoints, the newest whole ones where no step is named. Both are "
        "verified first. Of each array that differs it says how many values do, and the largest absolute and "
        "relative difference; the largest come first. In memory is a chunk of each side. Exit code 0 if all "
        f"are equal bit for bit, {ANSWER_IS_NO} if not.",
        ("zaya ckpt diff runs/tiny:100 runs/tiny:200", "zaya ckpt diff runs/tiny runs/again --training"),
    )
    parser.add_argument("ours", metavar="RUN[:STEP]", help="a run, and one of its steps")
    parser.add_argument("theirs", metavar="RUN[:STEP]", help="another")
    parser.add_argument("--training", action="store_true", help="compare the optimiser's state too")
    options = parser.parse_args(argv)
    sides = [require_whole(*split_step(side)) for side in (options.ours, options.theirs)]
    items = (WEIGHTS, TRAINING) if options.training else (WEIGHTS,)
    if options.training:
        _require_training(sides)
    names = [f"{side.run_folder}:{side.step}" for side in sides]
    comparisons = []
    for item in items:
        comparisons.append(compare(*(StoredArrays(side, item) for side in sides)))
        _print_comparison(comparisons[-1], item, names)
    if not all(comparison.is_equal for comparison in comparisons):
        sys.exit(ANSWER_IS_NO)


def split_step(text: str) -> tuple[str, int | None]:
    """A run folder and a step in "RUN:STEP"; a folder that has a colon in its name is none."""
    run, colon, step = text.rpartition(":")
    if pathlib.Path(text).exists() or not (colon and step.isascii() and step.isdecimal()):
        return text, None
    return run, int(step)


def _require_training(sides: Sequence[SavedStep]) -> None:
    for side in sides:
        if not has_training(side.run_folder, side.step):
            raise ValueError(f"step {side.step} of {side.run_folder} has weights only; leave out --training")


def _print_comparison(found: Comparison, item: str, names: Sequence[str]) -> None:
    for side, only in zip(names, (found.only_ours, found.only_theirs), strict=True):
        for name in only:
            print(f"{item}: only {side} has {name}")
    for name, (ours, theirs) in found.shapes.items():
        print(f"{item}: {name} has the shape {ours} and {theirs}")
    others = [each for each in found.differences if not each.is_none]
    if others:
        table = Table(
            name_column(item), name_column("type"), number_column("values"),
            number_column("absolute"), number_column("relative"),
            title=" and ".join(names),
        )  # fmt: skip
        for each in others:
            types, values = " and ".join(dict.fromkeys(each.dtypes)), f"{each.num_values:,}"
            table.add_row(each.name, types, values, f"{each.absolute:.3g}", f"{each.relative:.3g}")
        Console(soft_wrap=True, highlight=False).print(table)
    equal = len(found.differences) - len(others)
    num_arrays = len(found.differences) + len(found.shapes) + len(found.only_ours) + len(found.only_theirs)
    print(f"{item}: {equal} of {num_arrays} arrays are equal bit for bit")


# prune


def prune(argv: Sequence[str]) -> None:
    """Removes the checkpoints that no rule keeps, or says which they are."""
    parser = Parser(
        "ckpt prune",
        "Removes the checkpoints that no rule keeps, as a run does behind each save. What is not given is as "
        "the run's config has it; ends of phases stay. The newest checkpoint that is whole, which is read "
        "for that, never goes, and neither do damaged ones behind it nor those that were set aside.",
        (
            "zaya ckpt prune runs/tiny --keep=1 --dry-run",
            "zaya ckpt prune runs/tiny --keep=2 --keep-every=1000 --keep-best",
        ),
    )
    _add_run(parser)
    parser.add_argument("--keep", type=int, metavar="K", help="the newest K stay")
    parser.add_argument("--keep-every", type=int, metavar="J", help="steps that are a multiple of J stay")
    parser.add_argument(
        "--keep-best", action=argparse.BooleanOptionalAction, help="the lowest held-out loss stays"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    options = parser.parse_args(argv)
    retention = _with_rules(retention_of(read_config(options.run)), options)
    require_present(options.run, [])
    # A run that is alive removes steps of its own.
    with contextlib.nullcontext() if options.dry_run else run_lock(options.run):
        _prune(options.run, retention, dry_run=options.dry_run)


def _prune(run_folder: str, retention: Retention, *, dry_run: bool) -> None:
    whole = newest_step(run_folder)
    assert whole is not None, "there are checkpoints, and if none was whole there was an error"
    steps = [step for step in all_steps(run_folder) if step <= whole]
    chosen = steps_to_remove(steps, retention, losses=held_out_losses(run_folder), whole=whole)
    done, freed = "would go" if dry_run else "removed", 0
    for step in chosen:
        size = folder_bytes(step_folder(run_folder, step))
        if not dry_run:
            remove_step(run_folder, step)
        freed += size
        print(f"step {step}: {format_bytes(size)} {done}", flush=True)
    left = ", ".join(str(step) for step in steps if step not in chosen)
    print(f"{format_bytes(freed)} {done}; steps that stay: {left}")


def _with_rules(retention: Retention, options: argparse.Namespace) -> Retention:
    """The rules of a run with those that the command line has otherwise."""
    for name, value in (("--keep", options.keep), ("--keep-every", options.keep_every)):
        if value is not None and value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    given = {"newest": options.keep, "every": options.keep_every, "best": options.keep_best}
    return dataclasses.replace(
        retention, **{name: value for name, value in given.items() if value is not None}
    )


# reshape


def reshape_step(argv: Sequence[str]) -> None:
    """Writes a checkpoint in another form into a run folder of its own."""
    parser = Parser(
        "ckpt reshape",
        "Writes a checkpoint, the newest whole one where no step is named, as the only one of a new run "
        "folder OUT, which appears when it is whole. What is read is verified first. With --weights-only OUT "
        "is for `zaya generate`, `zaya convert` and train.init_from; without, a run goes on from it. A "
        "checkpoint does not depend on the number of processes or devices that wrote it or will read it, so "
        "that there is nothing to say of them. In memory is a chunk of one weight.",
        (
            "zaya ckpt reshape runs/tiny:200 runs/small --weights-only --dtype=bfloat16",
            "zaya ckpt reshape runs/tiny:100 runs/branch           # a step to go on from, bit for bit",
        ),
    )
    parser.add_argument("run", metavar="RUN[:STEP]", help="a run, and one of its steps")
    parser.add_argument("out", metavar="OUT", help="the run folder to make")
    parser.add_argument("--dtype", choices=list(DTYPES), help="of the weights (default: as they are)")
    parser.add_argument("--weights-only", action="store_true", help="leave the optimiser's state out")
    options = parser.parse_args(argv)
    out, dtype = pathlib.Path(options.out), options.dtype and DTYPES[options.dtype]
    saved = require_whole(*split_step(options.run))
    metrics = pathlib.Path(saved.run_folder, METRICS_FILE)
    # A run that goes on drops the lines of later steps, and one that is finished asks for its last one.
    extra = {} if options.weights_only or not metrics.exists() else {METRICS_FILE: metrics.read_bytes()}
    try:
        reshape(saved, out, dtype=dtype, weights_only=options.weights_only, extra=extra)
    except OSError as error:
        error.filename = error.filename or options.out
        raise
    what = "weights" if options.weights_only else "all"
    print(f"{out}: {what} of step {saved.step} of {saved.run_folder}, {format_bytes(folder_bytes(out))}")


def _add_run(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run")


VERBS: dict[str, Callable[[Sequence[str]], None]] = {
    "ls": list_steps,
    "verify": verify,
    "diff": diff,
    "prune": prune,
    "reshape": reshape_step,
}
