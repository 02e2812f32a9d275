"""Training runs of the optimizer comparison: variants, sizes, tuning trials and seeds.

Every variant has the same trials: the same points of a Halton sequence, mapped to its range of rates. Tuning
and comparison use different seeds, so that the noise of a selected trial is no advantage.

All runs of a variant at a size share one compiled step, because compilation takes as long as a run. Learning
rates are read from a table by the step of the state, which starts at another multiple of `STRIDE` for each
setting.

Letters: S settings.
"""

import dataclasses
import itertools
import math
import multiprocessing
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.queues import Queue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from scipy.stats import qmc

from zaya_jax.config import Config
from zaya_jax.data.reading.loader import evaluation_batches, training_batches
from zaya_jax.data.reading.positions import mixture_positions
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import initialize
from zaya_jax.optim.schedules import phase_schedule
from zaya_jax.options import DEFAULT_CONFIG, load_config
from zaya_jax.parallel.mesh import data_mesh, place_rows
from zaya_jax.run_folder.events import append_line, lines_of, parse_line
from zaya_jax.train.compiled_programs import make_programs
from zaya_jax.train.setup import open_data
from zaya_jax.train.step.state import TrainSetup, TrainState, first_state, make_setup


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
    "adamw": Variant({"name": "adamw"}, 2e-3),
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
      width: hidden size, a multiple of 32; experts are twice as wide.
      num_layers: number of layers.
      num_steps: number of steps of a run.
    """

    width: int
    num_layers: int
    num_steps: int


SIZES = {"small": Size(32, 2, 300), "medium": Size(64, 2, 300), "large": Size(128, 2, 300)}
BATCH_SIZE, LENGTH, EVAL_SEQUENCES, HEAD_DIM = 8, 128, 256, 16
TUNING_SEED = 1_000
"""Seed of all tuning trials; seeds of the comparison count from 0."""
STRIDE = 1_000_000
"""Distance of the first steps of two settings; runs are shorter."""


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
class OptimizerComparison:
    """What is compared.

    Attributes:
      folder: folder of the corpus and the results.
      sizes: networks by name.
      variants: names of optimizers.
      num_trials: number of tuning trials of each optimizer and size.
      num_seeds: number of seeds of the comparison.
    """

    folder: pathlib.Path
    sizes: dict[str, Size]
    variants: Sequence[str]
    num_trials: int
    num_seeds: int


def trials(comparison: OptimizerComparison, size: str, variant: str) -> list[Run]:
    """Tuning trials of a variant, of half of the steps: twice as many as whole runs at the same cost."""
    # They cover the square more evenly than random points. The first point of the sequence is a corner.
    points = qmc.Halton(2, scramble=False).fast_forward(1).random(comparison.num_trials)
    rates = RANGE ** (2 * points - 1) * (VARIANTS[variant].matrix_rate, OTHER_RATE)
    # Rounded, so that the printed rates are those of the runs.
    return [
        Run(
            size=size,
            variant=variant,
            matrix_rate=float(f"{of_matrices:.3g}"),
            other_rate=float(f"{of_others:.3g}"),
            seed=TUNING_SEED,
            num_steps=comparison.sizes[size].num_steps // 2,
        )
        for of_matrices, of_others in rates
    ]


def seed_runs(comparison: OptimizerComparison, best: Run) -> list[Run]:
    """Runs with the tuned rates: all seeds, first for all steps and then for half of them."""
    return [
        dataclasses.replace(best, seed=seed, num_steps=num_steps)
        for num_steps in (comparison.sizes[best.size].num_steps, best.num_steps)
        for seed in range(comparison.num_seeds)
    ]


def run_config(comparison: OptimizerComparison, run: Run) -> Config:
    """Config with which `zaya train` trains the same run."""
    tiny, size, variant = load_config(DEFAULT_CONFIG, []), comparison.sizes[run.size], VARIANTS[run.variant]
    name = f"{run.size}_{run.variant}_{run.matrix_rate}_{run.other_rate}_{run.seed}_{run.num_steps}"
    return dataclasses.replace(
        tiny,
        run_folder=str(comparison.folder / "runs" / name),
        model=dataclasses.replace(
            tiny.model,
            hidden_size=size.width,
            num_hidden_layers=size.num_layers,
            num_attention_heads=size.width // HEAD_DIM,
            num_key_value_heads=size.width // (2 * HEAD_DIM),
            head_dim=HEAD_DIM,
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
            seed=run.seed,
        ),
    )


def trials_and_seeds(
    comparison: OptimizerComparison, *, num_jobs: int
) -> dict[tuple[str, str], tuple[list[float], list[Run], list[float]]]:
    """Trains all runs that are not finished, in processes of one core each.

    Args:
      comparison: what is compared.
      num_jobs: number of processes.

    Returns:
      By size and variant: losses of the trials, runs of the seeds with the tuned rates, and their losses.
    """
    # Largest first, so that the processes end at about the same time.
    keys = [(size, variant) for size in reversed(comparison.sizes) for variant in comparison.variants]
    # Before the processes start, which would each build the corpus.
    open_data(run_config(comparison, trials(comparison, *keys[0])[0]))
    # Not fork: a process that is forked from one with threads, such as those of jax, can deadlock.
    context = multiprocessing.get_context("spawn")
    cores = context.Queue()
    for _, core in zip(range(num_jobs), itertools.cycle(sorted(os.sched_getaffinity(0))), strict=False):
        cores.put(core)
    with ProcessPoolExecutor(num_jobs, context, _use_core, (cores,)) as pool:
        futures = {key: pool.submit(_train_all, comparison, *key) for key in keys}
        return {key: future.result() for key, future in futures.items()}


def _use_core(cores: "Queue[int]") -> None:
    # jax starts as many threads as a process has cores, when it is first used.
    os.sched_setaffinity(0, {cores.get()})
    # Processes would share a GPU.
    jax.config.update("jax_platforms", "cpu")


def _train_all(
    comparison: OptimizerComparison, size: str, variant: str
) -> tuple[list[float], list[Run], list[float]]:
    tuning = trials(comparison, size, variant)
    train = trainer(comparison, tuning)
    losses = list(map(train, tuning))
    runs = seed_runs(comparison, tuning[int(np.argmin(losses))])
    return losses, runs, list(map(train, runs))


def trainer(comparison: OptimizerComparison, tuning: Sequence[Run]) -> Callable[[Run], float]:
    """Returns a function that trains a run unless it is finished, and returns its held-out loss.

    Args:
      comparison: what is compared.
      tuning: tuning trials of a variant at a size; runs have the rates of one of them.
    """
    file = comparison.folder / "results.jsonl"
    rows = [row for row in map(parse_line, lines_of(file)) if row]
    # Seeds and numbers of steps are part of the key, so that more of them can be added later.
    finished = {_key(row): row["loss"] for row in rows}
    whole = [dataclasses.replace(run, num_steps=comparison.sizes[run.size].num_steps) for run in tuning]
    program = None

    def train(run: Run) -> float:
        nonlocal program
        key = _key(dataclasses.asdict(run))
        if key not in finished:
            start = time.process_time()
            # Compiled only if some run is not finished.
            program = program or _Program(comparison, [*tuning, *whole])
            loss = program.train(run)
            # JSON has no infinity.
            finished[key] = loss if math.isfinite(loss) else None
            seconds = round(time.process_time() - start, 1)
            append_line(file, dataclasses.asdict(run) | {"loss": finished[key], "cpu_seconds": seconds})
            print(f"{run}: {loss:.4f}, {seconds} s of CPU time", flush=True)
        return math.inf if finished[key] is None else finished[key]

    return train


def _key(values: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(values[field.name] for field in dataclasses.fields(Run))


class _Program:
    """The compiled step of all runs of a variant at a size."""

    def __init__(self, comparison: OptimizerComparison, settings: Sequence[Run]):
        self._comparison, self._settings = comparison, settings
        self._config = run_config(comparison, settings[0])
        self._corpora = open_data(self._config)
        self._mesh, self._setup = data_mesh(jax.devices()[:1]), _setup(self._config, settings)
        self._init = jax.jit(self._first_state)
        shapes = jax.eval_shape(self._first_state, 0, 0)
        self._programs = make_programs(shapes, setup=self._setup, mesh=self._mesh)

    def _first_state(self, seed: jax.Array, first_step: jax.Array) -> TrainState:
        # As `init_state`, whose seed is a constant.
        init_key, run_key = jax.random.split(jax.random.key(seed))
        state = first_state(self._setup, initialize(declare_run(self._config), init_key), run_key)
        return dataclasses.replace(state, step=jnp.asarray(first_step, jnp.int32))

    def train(self, run: Run) -> float:
        """Trains a run and returns its held-out loss in nats per token."""
        config = run_config(self._comparison, run)
        number = next(i for i, each in enumerate(self._settings) if _is_setting(run, each))
        state = self._init(run.seed, number * STRIDE)
        tokens = {folder: corpus.train.tokens for folder, corpus in self._corpora.items()}
        for step_range, position in mixture_positions(config, tokens):
            batches = training_batches(
                position, self._corpora, batch_size=step_range.batch_size, num_steps=step_range.num_steps
            )
            for batch in batches:
                state, _ = self._programs.step(state, place_rows(batch, self._mesh))
        return self._held_out_loss(config, state)

    def _held_out_loss(self, config: Config, state: TrainState) -> float:
        batches = evaluation_batches(
            self._corpora[config.data.corpus],
            split="validation",
            sequence_length=config.data.sequence_length,
            batch_size=config.data.batch_size,
            limit=config.train.eval_sequences,
        )
        # All batches are dispatched before the host waits for the first sum.
        sums = [self._programs.evaluate(state, place_rows(batch, self._mesh)) for batch in batches]
        return math.fsum(float(x.loss) for x in sums) / math.fsum(float(x.num_targets) for x in sums)


def _is_setting(run: Run, setting: Run) -> bool:
    return run == dataclasses.replace(setting, seed=run.seed)


def _setup(config: Config, settings: Sequence[Run]) -> TrainSetup:
    """Setup of the training step, with the learning rates of each setting."""
    matrix_S = jnp.array([run.matrix_rate for run in settings])
    # Rates of the other weights relative to those of matrices.
    others_S = jnp.array([run.other_rate / run.matrix_rate for run in settings])
    shapes = [_shape(config, run.num_steps) for run in settings]

    def schedule(step: Any) -> Any:
        setting, own_step = step // STRIDE, step % STRIDE
        return matrix_S[setting] * jnp.stack([jnp.asarray(shape(own_step)) for shape in shapes])[setting]

    optimizer = dataclasses.replace(config.optimizer, matrix_rate=1.0)
    setup = make_setup(dataclasses.replace(config, optimizer=optimizer), schedule=schedule)
    weights, partition = dict(setup.partition.weights), setup.partition
    others = {each.name for each in partition.flat_parameters if not weights[each.name].matrix}

    def update(updates: Any, state: Any, params: Any = None, *, step: jax.Array, **_: Any) -> Any:
        # AdamW's updates are proportional to the rate, unlike those of hyperball.
        ratio = others_S[step // STRIDE]
        return {name: x * ratio if name in others else x for name, x in updates.items()}, state

    scale = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]
    return dataclasses.replace(setup, optimizer=optax.chain(setup.optimizer, scale))


def _shape(config: Config, num_steps: int) -> optax.Schedule:
    """Learning rate of a run relative to its highest one."""
    optimizer = dataclasses.replace(
        config.optimizer,
        learning_rate=1.0,
        final_learning_rate=FINAL_RATE,
        warmup_steps=round(WARMUP * num_steps),
    )
    return phase_schedule(optimizer, num_steps)
