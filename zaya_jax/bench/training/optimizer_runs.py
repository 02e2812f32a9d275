"""Training runs of the optimizer comparison: variants, sizes, tuning trials and seeds.

Every variant has the same trials: the same points of a Halton sequence, mapped to its range of rates. Tuning
and comparison use different seeds, so that the noise of a selected trial is no advantage.
"""

import contextlib
import dataclasses
import itertools
import math
import multiprocessing
import os
import pathlib
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import Queue
from typing import Any

import jax
from scipy.stats import qmc

from zaya_jax.config import Config
from zaya_jax.options import DEFAULT_CONFIG, load_config
from zaya_jax.train.metrics.files import held_out_losses
from zaya_jax.train.trainer import train


@dataclasses.dataclass(frozen=True)
class Variant:
    """An optimizer of the comparison.

    Attributes:
      optimizer: fields of section `optimizer`.
      matrix_rate: middle of the range of learning rates of matrices.
    """

    optimizer: Mapping[str, Any]
    matrix_rate: float


VARIANTS = {
    "adamw": Variant({"name": "adamw"}, 6e-3),
    "muon": Variant({}, 1e-2),
    "muon-cautious": Variant({"cautious_decay": True}, 1e-2),
    "normuon": Variant({"normuon": True}, 1e-2),
    # Relative to the norm of the matrix. Weights of configs/tiny.py have an RMS of 0.05, and a step of Muon
    # 0.2 times its rate, so that these ranges mean about the same first steps.
    "muonh": Variant({"hyperball": True}, 4e-2),
}
OTHER_RATE = 6e-3
"""Middle of the range of learning rates of AdamW's weights."""
RANGE = 4.0
"""Ratio of the largest rate of a range to its middle, and of its middle to the smallest."""
FINAL_RATE, WARMUP = 0.05, 0.1
"""Last learning rate relative to the highest, and warm-up as a fraction of the steps."""


@dataclasses.dataclass(frozen=True)
class Size:
    """A network of the comparison; the rest is that of configs/tiny.py.

    Attributes:
      width: hidden size, a multiple of 64; experts are twice as wide.
      num_layers: number of layers.
      num_steps: number of steps of a run.
    """

    width: int
    num_layers: int
    num_steps: int


SIZES = {"small": Size(64, 2, 300), "medium": Size(128, 2, 300), "large": Size(192, 3, 300)}
BATCH_SIZE, LENGTH, EVAL_SEQUENCES = 8, 128, 256
TUNING_SEED = 1_000
"""Seed of all tuning trials; seeds of the comparison count from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A training run.

    Attributes:
      size: name of the network in `SIZES`.
      variant: name of the optimizer in `VARIANTS`.
      matrix_rate: learning rate of matrices.
      other_rate: learning rate of all other weights.
      seed: seed of the initial weights and of the order of the data.
      num_steps: number of steps.
    """

    size: str
    variant: str
    matrix_rate: float
    other_rate: float
    seed: int
    num_steps: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """What is compared.

    Attributes:
      folder: folder of the corpus and the results.
      sizes: networks by name.
      variants: names of optimizers.
      num_trials: number of tuning trials of each optimizer and size.
      num_seeds: number of seeds of the comparison.
    """

    folder: pathlib.Path
    sizes: Mapping[str, Size]
    variants: Sequence[str]
    num_trials: int
    num_seeds: int


def trials(comparison: Comparison, size: str, variant: str) -> list[Run]:
    """Tuning trials of a variant."""
    # They cover the square more evenly than random points. The first point of the sequence is a corner.
    points = qmc.Halton(2, scramble=False).fast_forward(1).random(comparison.num_trials)
    rates = RANGE ** (2 * points - 1) * (VARIANTS[variant].matrix_rate, OTHER_RATE)
    return [
        Run(
            size=size,
            variant=variant,
            matrix_rate=float(f"{of_matrices:.3g}"),
            other_rate=float(f"{of_others:.3g}"),
            seed=TUNING_SEED,
            num_steps=comparison.sizes[size].num_steps,
        )
        for of_matrices, of_others in rates
    ]


def comparison_runs(comparison: Comparison, best: Run) -> list[Run]:
    """Runs with the tuned rates: all seeds, for all steps and for half of them."""
    return [
        dataclasses.replace(best, seed=seed, num_steps=num_steps)
        for num_steps in (best.num_steps, best.num_steps // 2)
        for seed in range(comparison.num_seeds)
    ]


def run_config(comparison: Comparison, run: Run) -> Config:
    """Config of a run."""
    tiny, size, variant = load_config(DEFAULT_CONFIG, []), comparison.sizes[run.size], VARIANTS[run.variant]
    name = f"{run.size}_{run.variant}_{run.matrix_rate}_{run.other_rate}_{run.seed}_{run.num_steps}"
    return dataclasses.replace(
        tiny,
        run_folder=str(comparison.folder / "runs" / name),
        model=dataclasses.replace(
            tiny.model,
            hidden_size=size.width,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.width // 32,
            num_key_value_heads=size.width // 64,
            moe_intermediate_size=2 * size.width,
        ),
        data=dataclasses.replace(
            tiny.data,
            corpus=str(comparison.folder / "corpus"),
            tokenizer=str(comparison.folder / "tokenizer/tokenizer.json"),
            sequence_length=LENGTH,
            batch_size=BATCH_SIZE,
            seed=run.seed,
        ),
        optimizer=dataclasses.replace(
            tiny.optimizer,
            **variant.optimizer,
            learning_rate=run.other_rate,
            matrix_rate=run.matrix_rate / run.other_rate,
            final_learning_rate=FINAL_RATE * run.other_rate,
            warmup_steps=round(WARMUP * run.num_steps),
        ),
        train=dataclasses.replace(
            tiny.train,
            num_steps=run.num_steps,
            eval_every=run.num_steps,
            eval_sequences=EVAL_SEQUENCES,
            checkpoint_every=run.num_steps,
            sample_tokens=0,
            log_every=50,
            seed=run.seed,
        ),
    )


def held_out_loss(comparison: Comparison, run: Run) -> float | None:
    """Held-out loss of a run in nats per token, infinite if it diverged; None if the run is not finished."""
    loss = held_out_losses(run_config(comparison, run).run_folder).get(run.num_steps)
    return loss if loss is None or math.isfinite(loss) else math.inf


def train_all(comparison: Comparison, groups: Sequence[Sequence[Run]], *, num_jobs: int) -> list[list[float]]:
    """Trains runs in processes of one core each, without those that are finished, and returns their losses.

    Args:
      comparison: folder and sizes.
      groups: runs that share a process, one after the other.
      num_jobs: number of processes.
    """
    # Not fork: a process that is forked from one with threads, such as those of jax, can deadlock.
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for _, core in zip(range(num_jobs), itertools.cycle(sorted(os.sched_getaffinity(0))), strict=False):
        cores.put(core)
    with ProcessPoolExecutor(num_jobs, context, _use_core, (cores,)) as pool:
        # The first group builds the corpus, which the others read.
        first = pool.submit(_train_group, comparison, groups[0]).result()
        return [first, *pool.map(_train_group, itertools.repeat(comparison), groups[1:])]


def _use_core(cores: "Queue[int]") -> None:
    # jax starts as many threads as a process has cores, when it is first used.
    os.sched_setaffinity(0, {cores.get()})
    # Processes would share a GPU.
    jax.config.update("jax_platforms", "cpu")


def _train_group(comparison: Comparison, runs: Iterable[Run]) -> list[float]:
    return [_train(comparison, run) for run in runs]


def _train(comparison: Comparison, run: Run) -> float:
    """Trains a run unless it is finished, and returns its held-out loss."""
    config = run_config(comparison, run)
    if (loss := held_out_loss(comparison, run)) is not None:
        return loss
    start = time.process_time()
    comparison.folder.mkdir(parents=True, exist_ok=True)
    with open(comparison.folder / f"log_{os.getpid()}.txt", "a") as log, contextlib.redirect_stdout(log):
        train(config)
    # Only its losses are needed.
    shutil.rmtree(pathlib.Path(config.run_folder) / "checkpoints")
    loss = held_out_loss(comparison, run)
    assert loss is not None, "a run that ends has evaluated its last step"
    seconds = time.process_time() - start
    print(f"{pathlib.Path(config.run_folder).name}: {loss:.4f}, {seconds:.1f} s of CPU time", flush=True)
    return loss
