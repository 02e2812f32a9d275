"""`zaya bench optimizers`: tuned AdamW, Muon and its variants, compared over seeds at several sizes.

Each optimizer has the same tuning trials, and then trains the same seeds: the same initial weights and the
same batches. All runs decay their learning rate to their last step. With the tuned rates there are runs of
all steps and of half of them. In between, the loss is interpolated by the logarithm of the steps, which
gives the loss at equal modelled time and the steps to the same loss.
"""

import dataclasses
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from zaya_jax.bench.training.optimizer_runs import (
    BATCH_SIZE,
    LENGTH,
    SIZES,
    VARIANTS,
    OptimizerComparison,
    Run,
    run_config,
    trials_and_seeds,
)
from zaya_jax.options import Parser, check_at_least
from zaya_jax.plan.arithmetic import LINKS, seconds_in_turn, step_seconds
from zaya_jax.plan.cases import PUBLISHED
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.gpus import DEVICES
from zaya_jax.text_tables import name_column, number_column

DEVICE = "mi300x"
"""GPU of the time model."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOutcome:
    """Runs of one optimizer at one size.

    Attributes:
      tuned: settings of the best trial.
      trial_losses: held-out losses of all trials.
      losses_KN: held-out losses after all steps and after half of them, [2, seeds].
      step_seconds: modelled seconds of a step.
    """

    tuned: Run
    trial_losses: Sequence[float]
    losses_KN: np.ndarray
    step_seconds: float

    @property
    def mean(self) -> float:
        """Mean held-out loss over seeds after all steps."""
        return float(self.losses_KN[0].mean())

    @property
    def gain_of_doubling(self) -> float:
        """Decrease of the mean loss from half of the steps to all of them."""
        return float((self.losses_KN[1] - self.losses_KN[0]).mean())

    def losses_at(self, step_ratio: float) -> np.ndarray:
        """Losses of the seeds after a share of the steps, interpolated by the logarithm of the share."""
        # Over a factor of two, the loss is nearly linear in the logarithm of the steps.
        all_steps, half = self.losses_KN
        return all_steps - math.log2(step_ratio) * (half - all_steps)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `zaya bench optimizers`.

    Raises:
      UserError: if an option has an invalid value.
    """
    options = _parser().parse_args(argv)
    check_at_least(options, trials=1, seeds=2, jobs=1)
    sizes = {name: SIZES[name] for name in options.sizes}
    if options.steps is not None:
        check_at_least(options, steps=2)
        sizes = {name: dataclasses.replace(size, num_steps=options.steps) for name, size in sizes.items()}
    comparison = OptimizerComparison(
        folder=pathlib.Path(options.folder),
        sizes=sizes,
        variants=tuple(options.variants),
        num_trials=options.trials,
        num_seeds=options.seeds,
    )
    report(comparison, compare(comparison, num_jobs=options.jobs))


def _parser() -> Parser:
    parser = Parser(
        "bench optimizers",
        "Compare optimizers fairly on small networks of configs/tiny.py: each has the same number of "
        "tuning trials at each size, and then trains the same seeds. Prints tuned rates, held-out losses at "
        "equal tokens and at equal modelled time with the p of a paired t-test, and the steps to the same "
        "loss. The same command continues an interrupted comparison.",
        (
            "zaya bench optimizers",
            "zaya bench optimizers --sizes small --variants adamw muon muonh --trials 8",
        ),
    )
    parser.add_argument(
        "--sizes", nargs="+", choices=SIZES, default=list(SIZES), metavar="SIZE",
        help=f"networks to train, of {', '.join(SIZES)}",
    )  # fmt: skip
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME",
        help=f"optimizers of {', '.join(VARIANTS)}; the others are compared with the first one",
    )  # fmt: skip
    parser.add_argument(
        "--trials", default=8, help="tuning trials of each optimizer at each size, of half of the steps"
    )
    parser.add_argument(
        "--seeds", default=5, help="seeds of the comparison, none of which is used for tuning"
    )
    parser.add_argument("--steps", type=int, help="steps of a run; by default those of each size")
    parser.add_argument(
        "--jobs", default=len(os.sched_getaffinity(0)), help="processes, of one core each; default: all cores"
    )
    parser.add_argument(
        "--folder", default="runs/bench_optimizers", help="folder of the corpus and of all runs"
    )
    return parser


def compare(comparison: OptimizerComparison, *, num_jobs: int) -> dict[tuple[str, str], OptimizerOutcome]:
    """Tunes and trains all optimizers at all sizes; returns their outcomes by size and optimizer."""
    results = trials_and_seeds(comparison, num_jobs=num_jobs)
    return {
        key: OptimizerOutcome(
            tuned=runs[0],
            trial_losses=trial_losses,
            losses_KN=np.reshape(losses, (2, -1)),
            step_seconds=modelled_seconds(comparison, runs[0]),
        )
        for key, (trial_losses, runs, losses) in results.items()
    }


def modelled_seconds(comparison: OptimizerComparison, run: Run) -> float:
    """Seconds of a step of a run on one GPU by the arithmetic of `zaya plan`.

    Products in bfloat16, those of the router in float32, at the share of their peak that the published case
    assumes, and minimum memory traffic at full bandwidth, one after the other.
    """
    cluster, config = Cluster(device=DEVICES[DEVICE], nodes=1, gpus_per_node=1), run_config(comparison, run)
    # As in the presets for GPUs; the runs are in float32, which is faster on a CPU.
    execution = dataclasses.replace(config.execution, dtype="bfloat16")
    optimizer = dataclasses.replace(config.optimizer, newton_schulz_dtype="bfloat16")
    seconds = step_seconds(dataclasses.replace(config, execution=execution, optimizer=optimizer), cluster)
    seconds = seconds_in_turn(seconds, PUBLISHED.product_share)
    return math.fsum(value for name, value in seconds.items() if name not in LINKS)


def steps_ratio(outcome: OptimizerOutcome, base: OptimizerOutcome) -> float:
    """Steps that the base needs relative to those of the other optimizer, for the same mean loss.

    The better of the two reaches the other's final loss earlier, between half of its steps and all of them.
    Outside of 0.5 to 2 the ratio is an extrapolation.
    """
    gap = base.mean - outcome.mean
    # So that the ratio is an interpolation whichever of the two is better.
    better = outcome if gap > 0 else base
    return 2 ** (gap / better.gain_of_doubling)


def report(comparison: OptimizerComparison, outcomes: Mapping[tuple[str, str], OptimizerOutcome]) -> None:
    """Prints tuned settings and results of each size."""
    console = Console(soft_wrap=True, highlight=False)
    for size, network in comparison.sizes.items():
        of_size = {variant: outcomes[size, variant] for variant in comparison.variants}
        tokens = network.num_steps * BATCH_SIZE * LENGTH
        console.print(
            f"{size}: width {network.width}, {network.num_layers} layers, {network.num_steps} steps, "
            f"{tokens:,} tokens; {comparison.num_trials} trials of each optimizer with half of the steps, "
            f"{comparison.num_seeds} seeds"
        )
        console.print(_settings_table(of_size))
        console.print(_results_table(of_size))
    console.print(
        f"Time: a step on one {DEVICE} by zaya plan's arithmetic, products at {PUBLISHED.product_share:.0%} "
        "of their peak plus minimum memory traffic. p: paired t-test against the first optimizer, two-sided, "
        "not corrected for the number of comparisons. Fewer steps: steps of the first optimizer relative to "
        "those that reach the same loss; outside of 0.5 to 2 it is an extrapolation."
    )


def _settings_table(outcomes: Mapping[str, OptimizerOutcome]) -> Table:
    columns = ("rate of\nmatrices", "rate of\nothers", "best\ntrial", "median\ntrial", "time of\na step")
    table = Table(name_column("tuned"), *map(number_column, columns))
    base = next(iter(outcomes.values()))
    for variant, outcome in outcomes.items():
        run = outcome.tuned
        table.add_row(
            variant,
            f"{run.matrix_rate:g}",
            f"{run.other_rate:g}",
            f"{min(outcome.trial_losses):.4f}",
            f"{np.median(outcome.trial_losses):.4f}",
            f"{outcome.step_seconds / base.step_seconds:.3f}",
        )
    return table


def _results_table(outcomes: Mapping[str, OptimizerOutcome]) -> Table:
    columns = ("loss at equal\ntokens", "p", "loss at equal\ntime", "p", "fewer\nsteps")
    table = Table(name_column("held-out"), *map(number_column, columns))
    base = next(iter(outcomes.values()))
    for variant, outcome in outcomes.items():
        # The time of all steps of the first optimizer.
        in_time = outcome.losses_at(base.step_seconds / outcome.step_seconds)
        row = [_mean(outcome.losses_KN[0]), "", _mean(in_time), "", ""]
        # Nothing is compared with itself.
        if outcome is not base:
            row[1], row[3] = _p(outcome.losses_KN[0], base.losses_KN[0]), _p(in_time, base.losses_KN[0])
            row[4] = f"{steps_ratio(outcome, base):.2f}x"
        table.add_row(variant, *row)
    return table


def _mean(losses_N: np.ndarray) -> str:
    return f"{losses_N.mean():.4f} ± {losses_N.std(ddof=1):.3f}"


def _p(losses_N: np.ndarray, base_N: np.ndarray) -> str:
    return f"{stats.ttest_rel(losses_N, base_N).pvalue:.2g}"
