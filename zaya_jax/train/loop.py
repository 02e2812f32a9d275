"""The loop around the step: batches in, metrics and checkpoints out, resumable at any moment."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from zaya_jax.checkpoint import (
    FOLDER,
    Checkpoints,
    load_weights,
    newest_step,
)
from zaya_jax.config import Config
from zaya_jax.data.batch import Batch
from zaya_jax.data.loader import evaluation_batches, num_sequences, training_batches
from zaya_jax.data.mixture import Reading
from zaya_jax.data.shards import Corpus
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.model.flops import train_flops_per_token
from zaya_jax.model.implementations import describe_implementations
from zaya_jax.optim.balancing import expert_loads, load_entropy
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.parallel.compiler import compiler_options
from zaya_jax.parallel.mesh import by_rows, data_mesh, replicated
from zaya_jax.train.metrics import MetricsWriter, bits_per_byte, peak_flops, read_metrics, text_bytes
from zaya_jax.train.opening import check_folder, open_data, prepare_folder
from zaya_jax.train.phases import Stretch, check_devices, describe_batch, describe_phase
from zaya_jax.train.progress import ProgressLine
from zaya_jax.train.reading import describe_epochs, readings
from zaya_jax.train.state import (
    Rules,
    TrainState,
    abstract_state,
    checkpoint_shardings,
    from_checkpoint,
    init_state,
    make_rules,
    shardings,
    to_checkpoint,
    with_variables,
)
from zaya_jax.train.step import Metrics, compiled_step, evaluate_step


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run has to show."""

    config: Config
    corpus: Corpus
    rules: Rules
    state: TrainState
    validation_bits_per_byte: float


@dataclasses.dataclass(frozen=True)
class _Run:
    """All that stays the same while a run goes on."""

    config: Config
    corpora: dict[str, Corpus]
    """By folder; those of all phases, and the one that is held out."""
    token_bytes_V: np.ndarray
    mesh: Mesh
    schedule: optax.Schedule

    @property
    def corpus(self) -> Corpus:
        """Whose held-out split is scored."""
        return self.corpora[self.config.data.corpus]


@dataclasses.dataclass(frozen=True)
class _Programs:
    """What is compiled for a stretch of a run."""

    rules: Rules
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batch], Any]
    checkpoint: Callable[[TrainState], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class _Outputs:
    """Where a run writes."""

    checkpoints: Checkpoints
    writer: MetricsWriter
    progress: ProgressLine


class _Clock:
    """Seconds a step since the last look, without what evaluation and checkpoints took."""

    def __init__(self):
        self._step: int | None = None
        self._time = time.monotonic()

    def restart(self, step: int) -> None:
        self._step, self._time = step, time.monotonic()

    def lap(self, step: int) -> float:
        seconds = time.monotonic() - self._time
        steps = 1 if self._step is None else max(step - self._step, 1)
        self.restart(step)
        return seconds / steps


def train(config: Config, *, overwrite: bool = False) -> TrainResult:
    """Trains, from the newest checkpoint of the run folder if there is one, to the last step.

    Args:
      config: of the run; one that has begun goes on with no other than `zaya_jax.config.resume` allows.
      overwrite: throws away what the run folder holds.

    Raises:
      ValueError: for whatever cannot work, before anything is compiled.
    """
    mesh = data_mesh()
    check_devices(config, mesh.size)
    check_folder(config, overwrite=overwrite)  # before minutes go into a corpus
    corpora = open_data(config)
    changed = prepare_folder(config, overwrite=overwrite)
    if changed:
        print(f"run {config.run_folder} goes on otherwise than before: {'; '.join(map(str, changed))}")
    run = _make_run(config, corpora, mesh)
    with Checkpoints(config.run_folder, keep=config.train.keep_checkpoints) as checkpoints:
        state = _start(run, checkpoints)
        first_step = int(state.step)
        if first_step == config.train.num_steps:
            print(f"run {config.run_folder} is finished: it has all {first_step:,} steps")
            return _result(
                run, make_rules(config.phase_at(first_step).config, mesh.size, run.schedule), state
            )
        with (
            MetricsWriter(config.run_folder, first_step=first_step) as writer,
            ProgressLine(config.train.num_steps, first_step) as progress,
        ):
            _introduce(run, first_step, progress)
            return _loop(run, state, _Outputs(checkpoints, writer, progress))


def _make_run(config: Config, corpora: dict[str, Corpus], mesh: Mesh) -> _Run:
    tokenizer = load_tokenizer(config.data.tokenizer)
    token_bytes_V = np.zeros(config.model.vocab_size, np.int32)
    token_bytes_V[: tokenizer.vocab_size] = tokenizer.token_bytes()
    return _Run(
        config=config,
        corpora=corpora,
        token_bytes_V=token_bytes_V,
        mesh=mesh,
        schedule=learning_rate_schedule(config),
    )


def _make_programs(run: _Run, stretch: Stretch) -> _Programs:
    mesh = run.mesh
    rules = make_rules(stretch.phase.config, mesh.size, run.schedule)
    state = abstract_state(run.config, rules, mesh)
    return _Programs(
        rules=rules,
        step=compiled_step(state, rules=rules, mesh=mesh, num_microbatches=stretch.num_microbatches),
        evaluate=jax.jit(
            functools.partial(evaluate_step, rules=rules, mesh=mesh),
            in_shardings=(shardings(state, mesh), by_rows(mesh)),
            out_shardings=replicated(mesh),
            compiler_options=compiler_options(mesh),
        ),
        checkpoint=jax.jit(
            to_checkpoint,
            out_shardings=checkpoint_shardings(jax.eval_shape(to_checkpoint, state), mesh),
        ),
    )


def _start(run: _Run, checkpoints: Checkpoints) -> TrainState:
    """The newest checkpoint's state, or a fresh one, dealt out to the devices."""
    rules = make_rules(run.config.phase_at(1).config, run.mesh.size, run.schedule)
    state = abstract_state(run.config, rules, run.mesh)
    placed = shardings(state, run.mesh)
    step = newest_step(run.config.run_folder)
    if step is None:
        init = jax.jit(
            functools.partial(init_state, run.config, rules),
            out_shardings=placed,
            compiler_options=compiler_options(run.mesh, once=True),
        )
        return _with_weights(run, init())
    if not checkpoints.has_training(step):
        raise ValueError(
            f"{run.config.run_folder} holds weights only; train from them in a folder of its own: "
            f"--config.train.init_from={run.config.run_folder} --config.run_folder=ANOTHER"
        )
    saved = jax.eval_shape(to_checkpoint, state)
    saved = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        saved,
        checkpoint_shardings(saved, run.mesh),
    )
    weights, training = checkpoints.restore(step, weights=saved["weights"], training=saved["training"])
    restored = {"weights": weights, "training": training}
    return jax.jit(functools.partial(from_checkpoint, like=state), out_shardings=placed)(restored)


def _with_weights(run: _Run, state: TrainState) -> TrainState:
    """A fresh state with the weights of another run, if one is given."""
    folder = run.config.train.init_from
    if folder is None:
        return state
    saved = load_weights(folder, functools.partial(checkpoint_shardings, mesh=run.mesh))
    placed = shardings(state, run.mesh)
    return jax.jit(with_variables, out_shardings=placed, donate_argnums=0)(state, saved.variables)


def _introduce(run: _Run, first_step: int, progress: ProgressLine) -> None:
    config = run.config
    device = run.mesh.devices.flat[0]
    what = f"of {config.data.batch_tokens:,} tokens from {run.corpus.folder}"
    if config.phases:
        what = f"in {len(config.phases)} phases"
    progress.say(
        f"run {config.run_folder} on {run.mesh.size} x {device.device_kind}: "
        f"{config.train.num_steps:,} steps {what}"
    )
    progress.say(describe_implementations(config.execution, config.model))
    if first_step:
        progress.say(f"resuming at step {first_step} from {config.run_folder}/{FOLDER}")


def _loop(run: _Run, state: TrainState, outputs: _Outputs) -> TrainResult:
    """Makes the stretches of the run that are left, each with programs of its own."""
    clock, phase, rules = _Clock(), None, None
    num_tokens = {folder: corpus.train.tokens for folder, corpus in run.corpora.items()}
    for stretch, reading in readings(run.config, num_tokens, first_step=int(state.step)):
        if stretch.phase.name and stretch.phase != phase:
            outputs.progress.say(describe_phase(stretch.phase))
        if stretch.phase.config.data.batch_ramp:
            outputs.progress.say(describe_batch(stretch))
        programs = _make_programs(run, stretch)
        clock.restart(stretch.first_step)
        outputs.progress.compiling()
        state = _make_stretch(run, stretch, reading, programs, state, outputs, clock)
        if stretch.end == stretch.phase.end:
            read = reading.after(stretch.num_steps * stretch.batch_size)
            outputs.progress.say(describe_epochs(read))
        phase, rules = stretch.phase, programs.rules
    assert rules is not None, "a run that is not finished has a step left"
    return _result(run, rules, state)


def _make_stretch(
    run: _Run,
    stretch: Stretch,
    reading: Reading,
    programs: _Programs,
    state: TrainState,
    outputs: _Outputs,
    clock: _Clock,
) -> TrainState:
    train_config, first_step = run.config.train, int(state.step)
    batches = training_batches(
        reading, run.corpora, batch_size=stretch.batch_size, num_steps=stretch.num_steps
    )
    for step, batch in enumerate(batches, start=stretch.first_step + 1):
        rows = jax.device_put(batch, by_rows(run.mesh))
        with jax.transfer_guard("disallow"):
            state, metrics = programs.step(state, rows)
        num_bytes = text_bytes(np.asarray(batch.targets_BT), np.asarray(batch.weights_BT), run.token_bytes_V)
        outputs.progress.add(metrics.loss, metrics.num_targets, num_bytes)
        ends_phase = step == stretch.phase.end
        due = step == 1 or ends_phase or step % train_config.log_every == 0
        if due or step == first_step + 1:  # a resumed run shows at once that it lives
            values = _train_values(run, stretch, step, jax.device_get(metrics), num_bytes, clock.lap(step))
            read = reading.after((step - stretch.first_step) * stretch.batch_size)
            values |= {f"epochs/{folder}": count for folder, count in read.epochs().items()}
            outputs.progress.update(step, values, stretch.phase.name)
            if due:
                outputs.writer.write(step, "train", values, phase=stretch.phase.name)
        if ends_phase or step % train_config.eval_every == 0:
            _evaluate(run, stretch, programs, state, step, outputs)
            clock.restart(step)
        if ends_phase or step % train_config.checkpoint_every == 0:
            with outputs.progress.pausing():
                outputs.checkpoints.save(step, **programs.checkpoint(state))
            clock.restart(step)
    return state


def _result(run: _Run, rules: Rules, state: TrainState) -> TrainResult:
    held_out = read_metrics(run.config.run_folder, "validation")[-1]["bits_per_byte"]
    return TrainResult(run.config, run.corpus, rules, state, held_out)


def _train_values(
    run: _Run, stretch: Stretch, step: int, metrics: Metrics, num_bytes: float, seconds: float
) -> dict[str, float]:
    """The scalars of a step, for people and files."""
    tokens_per_second = stretch.batch_tokens / seconds
    nats = float(metrics.loss) * float(metrics.num_targets)
    counts_LX = np.asarray(metrics.router_counts_LX)
    loads_LE = expert_loads(counts_LX)
    values = {
        "loss": float(metrics.loss),
        "bits_per_byte": bits_per_byte(nats, num_bytes),
        "gradient_norm": float(metrics.gradient_norm),
        "load_entropy": float(np.mean(load_entropy(counts_LX))),
        "router_entropy": float(np.mean(metrics.router_entropy_L)),
        "router_probability": float(np.mean(metrics.router_probability_L)),
        "skipped": float(counts_LX[:, -1].sum() / counts_LX.sum()),
        "learning_rate": float(np.asarray(run.schedule(step - 1))),
        "tokens": stretch.tokens_until(step),
        "largest_load": float(np.max(loads_LE)),
        "smallest_load": float(np.min(loads_LE)),
        "dead_experts": float(np.sum(counts_LX[:, :-1] == 0)),
        "logit_bound": float(metrics.logit_bound),
        "skipped_steps": float(metrics.skipped_steps),
        **{f"gradient_norm/{group}": float(norm) for group, norm in metrics.gradient_norms.items()},
        **{f"update_norm/{group}": float(norm) for group, norm in metrics.update_norms.items()},
        "tokens_per_second": tokens_per_second,
    }
    peak = peak_flops(run.mesh.devices.flat[0].device_kind)
    if peak is not None:
        flops = train_flops_per_token(run.config.model, stretch.sequence_length) * tokens_per_second
        values["model_flops_utilisation"] = flops / (peak * run.mesh.size)
    return values


def _evaluate(
    run: _Run, stretch: Stretch, programs: _Programs, state: TrainState, step: int, outputs: _Outputs
) -> None:
    """Says and writes down the held-out loss."""
    data, limit = stretch.phase.config.data, run.config.train.eval_sequences
    sequences = num_sequences(run.corpus, "validation", data.sequence_length)
    num_batches = math.ceil(min(sequences, limit or sequences) / data.batch_size)
    batches = evaluation_batches(
        run.corpus,
        split="validation",
        sequence_length=data.sequence_length,
        batch_size=data.batch_size,
        limit=limit,
    )
    nats = num_bytes = num_targets = 0.0
    for batch in outputs.progress.evaluating(step, batches, num_batches):
        sums = programs.evaluate(state, jax.device_put(batch, by_rows(run.mesh)))
        nats += float(sums.loss)
        num_targets += float(sums.num_targets)
        num_bytes += text_bytes(np.asarray(batch.targets_BT), np.asarray(batch.weights_BT), run.token_bytes_V)
    values = {"loss": nats / max(num_targets, 1), "bits_per_byte": bits_per_byte(nats, num_bytes)}
    outputs.writer.write(step, "validation", values, phase=stretch.phase.name)
    found = f"loss {values['loss']:.4f}, {values['bits_per_byte']:.4f} bits/byte"
    outputs.progress.say(f"step {step}: held-out {found}")
