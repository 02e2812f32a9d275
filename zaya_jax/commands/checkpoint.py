"""`zaya ckpt`: list, verify, compare, prune, rewrite and average the checkpoints of a run.

The command is not in package `checkpoint`, because retention rules and held-out losses belong to package
`train`, which depends on `checkpoint`.
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
    StoredArrays,
    all_damage,
    all_steps,
    average_steps,
    compare,
    folder_bytes,
    has_average,
    has_training,
    last_steps,
    newest_step,
    read_config,
    read_description,
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
from zaya_jax.errors import UserError
from zaya_jax.files.durable import path_in_errors
from zaya_jax.options import Parser, check_at_least, run_subcommand
from zaya_jax.run_folder.names import METRICS_FILE
from zaya_jax.text_tables import format_bytes, name_column, number_column
from zaya_jax.train.hooks.checkpointing import retention_of
from zaya_jax.train.metrics.files import held_out_losses

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
"""Types of weights, by name on the command line."""
EXIT_DIFFERENT = 3
"""Exit code if `verify` finds damage or `diff` finds a difference."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya ckpt`.

    Args:
      argv: arguments that follow `zaya ckpt` on the command line.

    Raises:
      UserError: for invalid arguments, or a run or step that does not exist.
    """
    parser = Parser(
        "ckpt",
        "List, verify, compare, prune, rewrite and average the checkpoints of a run. "
        "`zaya ckpt COMMAND --help` shows the options of each command.",
        (
            "zaya ckpt ls runs/tiny                               # list checkpoints",
            "zaya ckpt verify runs/tiny                           # read all files and compare their hashes",
            "zaya ckpt diff runs/tiny:100 runs/tiny:200           # compare the weights of two steps",
            "zaya ckpt prune runs/tiny --keep=1 --dry-run         # show what would be removed",
            "zaya ckpt reshape runs/tiny:100 runs/branch          # copy one step to a new run",
            "zaya ckpt average runs/tiny runs/mean --last=3       # mean of the weights of 3 steps",
        ),
    )
    run_subcommand(parser, SUBCOMMANDS, argv)


# ls


def list_steps(argv: Sequence[str]) -> None:
    """Prints a table of the checkpoints of a run, and their damage."""
    parser = Parser(
        "ckpt ls",
        "List the checkpoints of a run: size, held-out loss, state, and the rules that keep each. It "
        "compares names and sizes of files with the manifest, without reading them; `zaya ckpt verify` "
        "reads all.",
        ("zaya ckpt ls runs/tiny",),
    )
    _add_run(parser)
    run = parser.parse_args(argv).run
    retention, losses = retention_of(read_config(run)), held_out_losses(run)
    steps, aside = all_steps(run), steps_set_aside(run)
    # A run whose checkpoints were all set aside has something to list as well.
    if not aside:
        require_present(run, [])
    rules = rules_by_step(steps, retention, losses=losses)
    table = Table(
        number_column("step"), Column("written (UTC)", min_width=10), number_column("size"),
        name_column("phase"), number_column("held-out"), name_column("state"), name_column("kept by"),
        title=f"{run}: checkpoints",
    )  # fmt: skip
    # Without hashes, and only the first damage of each: the table needs no more, and files are not read.
    damage = {step: next(all_damage(run, step, hashes=False), None) for step in steps}
    for step in steps:
        kept_by, loss = ", ".join(rules[step]) or "nothing", losses.get(step)
        table.add_row(*_row(run, step, loss=loss, is_whole=damage[step] is None), kept_by)
    for folder in aside:
        size = format_bytes(folder_bytes(folder))
        # The name begins with the step that was set aside.
        table.add_row(folder.name.partition(".")[0], "", size, "", "", "set aside", folder.name)
    Console(soft_wrap=True, highlight=False).print(table)
    for step, message in damage.items():
        if message is not None:
            print(f"step {step} is damaged: {message}")


def _row(run: str, step: int, *, loss: float | None, is_whole: bool) -> tuple[str, ...]:
    """Columns of a checkpoint, except the rules that keep it."""
    # The description of a damaged checkpoint may be missing or wrong.
    description = read_description(run, step) if is_whole else None
    if description is None:
        written = step_written(run, step)
    else:
        written = datetime.datetime.fromisoformat(description.written)
    return (
        str(step),
        f"{written:%Y-%m-%d %H:%M}",
        format_bytes(folder_bytes(step_folder(run, step))),
        "" if description is None else description.phase,
        "" if loss is None else f"{loss:.4f}",
        _state(run, step, "" if description is None else description.weights, is_whole=is_whole),
    )


def _state(run: str, step: int, origin: str, *, is_whole: bool) -> str:
    """State of a checkpoint: whether it is intact, and what it contains."""
    # What a checkpoint lacks or has in addition decides which commands can use it.
    contents = [] if has_training(run, step) else ["weights only"]
    contents += ["with EMA"] if has_average(run, step) else []
    return ", ".join(["intact" if is_whole else "damaged", *contents, *filter(None, [origin])])


# verify


def verify(argv: Sequence[str]) -> None:
    """Verifies checkpoints by their hashes; exits with `EXIT_DIFFERENT` if one is damaged."""
    parser = Parser(
        "ckpt verify",
        "Read all files of a run's checkpoints and compare them with their hashes. Lists every damaged "
        f"file, and the step that a run would resume from. Exit code {EXIT_DIFFERENT} if a checkpoint is "
        "damaged.",
        ("zaya ckpt verify runs/tiny", "zaya ckpt verify runs/tiny 100 200"),
    )
    _add_run(parser)
    parser.add_argument(
        "steps", metavar="STEP", type=int, nargs="*", help="steps of the checkpoints (default: all)"
    )
    options = parser.parse_args(argv)
    require_present(options.run, options.steps)
    steps = options.steps or all_steps(options.run)
    intact = [step for step in steps if _verify_step(options.run, step)]
    if not options.steps:  # only known if all steps were verified
        print(f"a run resumes from step {max(intact)}" if intact else "no checkpoint is intact: restore one")
    if len(intact) < len(steps):
        sys.exit(EXIT_DIFFERENT)


def _verify_step(run: str, step: int) -> bool:
    """Whether a checkpoint is intact; prints its damage."""
    start, size = time.monotonic(), folder_bytes(step_folder(run, step))
    damage = list(all_damage(run, step))
    # A tiny checkpoint may take less time than the clock can measure.
    speed = size / 1e9 / max(time.monotonic() - start, 1e-9)
    state = f"damaged, {len(damage)} of its files" if damage else "intact"
    # Flushed, because a large checkpoint takes minutes.
    print(f"step {step}: {state} ({format_bytes(size)}, {speed:.2f} GB/s)", flush=True)
    for message in damage:
        print(f"  {message}", flush=True)
    return not damage


# diff


def diff(argv: Sequence[str]) -> None:
    """Prints the differences of two checkpoints; exits with `EXIT_DIFFERENT` if there are any."""
    parser = Parser(
        "ckpt diff",
        "Compare the arrays of two checkpoints, by default the newest intact ones. Both are verified "
        "first. For each array that differs it prints the number of differing values and the largest "
        "absolute and relative difference, largest first. Only a chunk of each is in memory. Exit code 0 "
        f"if all arrays are bitwise equal, else {EXIT_DIFFERENT}.",
        ("zaya ckpt diff runs/tiny:100 runs/tiny:200", "zaya ckpt diff runs/tiny runs/again --training"),
    )
    parser.add_argument(
        "first", metavar="RUN[:STEP]", help="a run and one of its steps (default: the newest)"
    )
    parser.add_argument("second", metavar="RUN[:STEP]", help="the run and step to compare with")
    parser.add_argument("--training", action="store_true", help="also compare the optimizer state")
    options = parser.parse_args(argv)
    # Verified before they are compared, because damage would look like a difference.
    sides = [require_whole(*split_step(side)) for side in (options.first, options.second)]
    items = (WEIGHTS, TRAINING) if options.training else (WEIGHTS,)
    for side in sides if options.training else ():
        if not has_training(side.run_folder, side.step):
            raise UserError(f"step {side.step} of {side.run_folder} has weights only; remove --training")
    names = [f"{side.run_folder}:{side.step}" for side in sides]
    comparisons = []
    for item in items:
        comparisons.append(compare(*(StoredArrays(side, item) for side in sides)))
        _print_comparison(comparisons[-1], item, names)
    if not all(comparison.is_equal for comparison in comparisons):
        sys.exit(EXIT_DIFFERENT)


def split_step(text: str) -> tuple[str, int | None]:
    """Splits "RUN:STEP" into run folder and step. An existing folder with a colon in its name has no step."""
    run, colon, step = text.rpartition(":")
    # `isdecimal` alone would accept the digits of all scripts.
    if pathlib.Path(text).exists() or not (colon and step.isascii() and step.isdecimal()):
        return text, None
    return run, int(step)


def _print_comparison(comparison: Comparison, item: str, names: Sequence[str]) -> None:
    for side, only in zip(names, (comparison.only_first, comparison.only_second), strict=True):
        for name in only:
            print(f"{item}: only {side} has {name}")
    for name, (first, second) in comparison.shapes.items():
        print(f"{item}: {name} has the shape {first} and {second}")
    # Equal arrays are only counted.
    others = [each for each in comparison.differences if not each.is_none]
    if others:
        table = Table(
            name_column(item), name_column("type"), number_column("values"),
            number_column("absolute"), number_column("relative"),
            title=" and ".join(names),
        )  # fmt: skip
        for each in others:
            # One name if both sides have the same type.
            types, values = " and ".join(dict.fromkeys(each.dtypes)), f"{each.num_values:,}"
            table.add_row(each.name, types, values, f"{each.absolute:.3g}", f"{each.relative:.3g}")
        Console(soft_wrap=True, highlight=False).print(table)
    equal = len(comparison.differences) - len(others)
    # An array of another shape, or one that only one side has, is not equal either.
    num_arrays = (
        len(comparison.differences)
        + len(comparison.shapes)
        + len(comparison.only_first)
        + len(comparison.only_second)
    )
    print(f"{item}: {equal} of {num_arrays} arrays are bitwise equal")


# prune


def prune(argv: Sequence[str]) -> None:
    """Removes the checkpoints that no rule keeps, or lists them."""
    parser = Parser(
        "ckpt prune",
        "Remove the checkpoints that no rule keeps, as a run does after each save. Rules default to the "
        "run's config; ends of phases are kept. The newest intact checkpoint is verified and always kept, "
        "and so are later damaged ones and those that were set aside.",
        (
            "zaya ckpt prune runs/tiny --keep=1 --dry-run",
            "zaya ckpt prune runs/tiny --keep=2 --keep-every=1000 --keep-best",
        ),
    )
    _add_run(parser)
    parser.add_argument("--keep", type=int, metavar="K", help="keep the newest K (default: the run's)")
    parser.add_argument("--keep-every", type=int, metavar="J", help="keep steps that are multiples of J")
    parser.add_argument(
        "--keep-best", action=argparse.BooleanOptionalAction, help="keep the lowest held-out loss"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    options = parser.parse_args(argv)
    retention = _with_rules(retention_of(read_config(options.run)), options)
    require_present(options.run, [])
    # Locked, because a live run removes steps as well.
    with contextlib.nullcontext() if options.dry_run else run_lock(options.run):
        _prune(options.run, retention, dry_run=options.dry_run)


def _prune(run_folder: str, retention: Retention, *, dry_run: bool) -> None:
    whole = newest_step(run_folder)
    assert whole is not None, "newest_step raises an error if no checkpoint is intact"
    # Later checkpoints are damaged. They are kept, because parts of them may still be of use.
    steps = [step for step in all_steps(run_folder) if step <= whole]
    chosen = steps_to_remove(steps, retention, losses=held_out_losses(run_folder), whole=whole)
    action, freed = "would be removed" if dry_run else "removed", 0
    for step in chosen:
        size = folder_bytes(step_folder(run_folder, step))
        # The size was read before, because afterwards there is nothing to measure.
        if not dry_run:
            remove_step(run_folder, step)
        freed += size
        print(f"step {step}: {format_bytes(size)} {action}", flush=True)
    kept = ", ".join(str(step) for step in steps if step not in chosen)
    print(f"{format_bytes(freed)} {action}; remaining steps: {kept}")


def _with_rules(retention: Retention, options: argparse.Namespace) -> Retention:
    """The rules of a run, overridden by those of the command line."""
    check_at_least(options, keep=1, keep_every=1)
    overrides = {"newest": options.keep, "every": options.keep_every, "best": options.keep_best}
    return dataclasses.replace(
        retention, **{name: value for name, value in overrides.items() if value is not None}
    )


# reshape


def reshape_step(argv: Sequence[str]) -> None:
    """Rewrites a checkpoint into a new run folder."""
    parser = Parser(
        "ckpt reshape",
        "Write a checkpoint, by default the newest intact one, as the only one of a new run folder OUT, "
        "which appears when it is complete. The checkpoint is verified first. With --weights-only, OUT is "
        "for `zaya generate`, `zaya convert` and train.init_from; without it, a run can resume from it. "
        "--weights=ema writes the moving average of the weights. A "
        "checkpoint does not depend on the number of processes or devices. Only a chunk of one weight is "
        "in memory.",
        (
            "zaya ckpt reshape runs/tiny:200 runs/small --weights-only --dtype=bfloat16",
            "zaya ckpt reshape runs/tiny:100 runs/branch           # a step to resume from, bitwise equal",
            "zaya ckpt reshape runs/tiny runs/mean --weights-only --weights=ema",
        ),
    )
    parser.add_argument("run", metavar="RUN[:STEP]", help="a run and one of its steps (default: the newest)")
    parser.add_argument("out", metavar="OUT", help="run folder to create")
    parser.add_argument("--dtype", choices=list(DTYPES), help="type of the weights (default: unchanged)")
    parser.add_argument("--weights-only", action="store_true", help="omit the optimizer state")
    parser.add_weights_option()
    options = parser.parse_args(argv)
    out, dtype = pathlib.Path(options.out), options.dtype and DTYPES[options.dtype]
    saved = require_whole(*split_step(options.run))
    metrics = pathlib.Path(saved.run_folder, METRICS_FILE)
    # A resuming run needs the metrics: it drops rows of later steps, and shows the last one when finished.
    extra = {} if options.weights_only or not metrics.exists() else {METRICS_FILE: metrics.read_bytes()}
    only, weights = options.weights_only, options.weights
    # Some errors, such as that of a full disk, do not name the file.
    with path_in_errors(out):
        reshape(saved, out, dtype=dtype, weights_only=only, weights=weights, extra=extra)
    what = "all" if not only else "weights" if weights == "raw" else "EMA"
    print(f"{out}: {what} of step {saved.step} of {saved.run_folder}, {format_bytes(folder_bytes(out))}")


# average


def average(argv: Sequence[str]) -> None:
    """Writes the mean of the weights of several checkpoints as a new run folder."""
    parser = Parser(
        "ckpt average",
        "Write the mean of the weights of several checkpoints of a run as a new run folder OUT, which "
        "appears when it is complete. Every checkpoint is verified first; sums are in float64 and rounded "
        "once. OUT has no optimizer state: it is for `zaya generate`, `eval`, `serve`, `convert` and "
        "train.init_from. "
        "Only a chunk of one weight is in memory.",
        (
            "zaya ckpt average runs/tiny runs/mean --last=3",
            "zaya ckpt average runs/tiny runs/mean --steps=100,200,300 --dtype=bfloat16",
        ),
    )
    _add_run(parser)
    parser.add_argument("out", metavar="OUT", help="run folder to create")
    # No default: how many checkpoints help depends on their distance and the learning rate.
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--last", type=int, metavar="N", help="average the newest N checkpoints")
    group.add_argument("--steps", metavar="A,B,...", help="average these steps")
    parser.add_argument("--dtype", choices=list(DTYPES), help="type of the weights (default: unchanged)")
    options = parser.parse_args(argv)
    check_at_least(options, last=2)
    steps = last_steps(options.run, options.last) if options.last else _parse_steps(options.steps)
    out = pathlib.Path(options.out)
    with path_in_errors(out):
        average_steps(options.run, out, steps, dtype=options.dtype and DTYPES[options.dtype])
    names = ", ".join(map(str, sorted(set(steps))))
    print(f"{out}: mean of the weights of steps {names} of {options.run}, {format_bytes(folder_bytes(out))}")


def _parse_steps(text: str) -> list[int]:
    """Parses steps that are separated by commas.

    Raises:
      UserError: if one is not a number.
    """
    # Parsed here, because argparse would report the name of a function.
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() for word in words):
        raise UserError(f'--steps is "{text}"; it must be steps separated by commas, such as 100,200,300')
    return [int(word) for word in words]


def _add_run(parser: Parser) -> None:
    parser.add_argument("run", metavar="RUN", help="folder of a run")


SUBCOMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "ls": list_steps,
    "verify": verify,
    "diff": diff,
    "prune": prune,
    "reshape": reshape_step,
    "average": average,
}
