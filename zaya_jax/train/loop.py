"""The loop around the step: batches in, metrics and checkpoints out, resumable at any moment."""

import dataclasses
import functools
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from zaya_jax.checkpoint import FOLDER, Checkpoints, read_config
from zaya_jax.config import CONFIG_FILE, Config, differences
from zaya_jax.data.batch import Batch
from zaya_jax.data.corpus import Corpus, ensure_corpus
from zaya_jax.data.loader import evaluation_batches, num_sequences, training_batches
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.model.flops import train_flops_per_token
from zaya_jax.optim.balancing import expert_loads, load_entropy
from zaya_jax.parallel.compiler import compiler_options
from zaya_jax.parallel.mesh import by_rows, check_batch_size, data_mesh, replicated
from zaya_jax.train.metrics import MetricsWriter, bits_per_byte, peak_flops, read_metrics, text_bytes
from zaya_jax.train.progress import ProgressLine
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
    corpus: Corpus
    token_bytes_V: np.ndarray
    mesh: Mesh
    rules: Rules
    step: Callable[[TrainState, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[TrainState, Batch], Any]
    checkpoint: Callable[[TrainState], dict[str, Any]]


def train(config: Config, *, overwrite: bool = False) -> TrainResult:
    """Trains, from the newest checkpoint of the run folder if there is one, to the last step.

    Args:
      config: of the run; a run folder of another config is refused.
      overwrite: throws away what the run folder holds.

    Raises:
      ValueError: for whatever cannot work, before anything is compiled.
    """
    mesh = data_mesh()
    check_batch_size(config.data.batch_size, config.train.num_microbatches, mesh.size)
    corpus = open_data(config)
    prepare_folder(config, overwrite=overwrite)
    run = _make_run(config, corpus, mesh)
    with Checkpoints(config.run_folder, keep=config.train.keep_checkpoints) as checkpoints:
        state = _start(run, checkpoints)
        first_step = int(state.step)
        if first_step == config.train.num_steps:
            print(f"run {config.run_folder} is finished: it has all {first_step:,} steps")
            return _result(run, state)
        with (
            MetricsWriter(config.run_folder, first_step=first_step) as writer,
            ProgressLine(config.train.num_steps, first_step) as progress,
        ):
            _introduce(run, first_step, progress)
            return _loop(run, state, checkpoints, writer, progress)


def open_data(config: Config) -> Corpus:
    """Opens the corpus, building it first where that is asked for, and checks that the run fits it.

    Raises:
      ValueError: if it cannot be had or does not fit.
    """
    vocab_size = load_tokenizer(config.data.tokenizer).vocab_size
    if vocab_size > config.model.vocab_size:
        raise ValueError(
            f'model.vocab_size is {config.model.vocab_size}; data.tokenizer "{config.data.tokenizer}" has '
            f"{vocab_size} tokens, and each must have its row"
        )
    corpus = ensure_corpus(config.data)
    for split in ("train", "validation"):
        num_sequences(corpus, split, config.data.sequence_length)
    return corpus


def prepare_folder(config: Config, *, overwrite: bool) -> None:
    """Makes the run folder, or accepts one of the same config.

    Raises:
      ValueError: if the folder holds a run of another config, or something that is no run.
    """
    folder = pathlib.Path(config.run_folder)
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise ValueError(
                f"run_folder is {folder}, and {path} is a file; it must be a folder or not exist yet"
            )
    if folder.exists() and any(folder.iterdir()):
        if not (folder / CONFIG_FILE).is_file():
            raise ValueError(
                f"{folder} is not empty and not a run folder; choose another --config.run_folder"
            )
        # Read also when it is to go: others' folders, Hugging Face's too, have a config.json.
        changed = differences(config, read_config(folder))
        if not overwrite:
            if changed:
                raise ValueError(
                    f"{folder} holds a run of another config ({'; '.join(changed[:3])}); choose another "
                    "--config.run_folder, or give --overwrite to throw the old run away"
                )
            return
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / (CONFIG_FILE + ".partial")
    aside.write_text(config.to_text())
    aside.rename(folder / CONFIG_FILE)


def _make_run(config: Config, corpus: Corpus, mesh: Mesh) -> _Run:
    rules = make_rules(config, mesh.size)
    state = abstract_state(config, rules, mesh)
    evaluate = functools.partial(evaluate_step, rules=rules, mesh=mesh)
    token_bytes_V = np.zeros(config.model.vocab_size, np.int32)
    token_bytes_V[: corpus.vocab_size] = load_tokenizer(config.data.tokenizer).token_bytes()
    return _Run(
        config=config,
        corpus=corpus,
        token_bytes_V=token_bytes_V,
        mesh=mesh,
        rules=rules,
        step=compiled_step(state, rules=rules, mesh=mesh, num_microbatches=config.train.num_microbatches),
        evaluate=jax.jit(
            evaluate,
            in_shardings=(shardings(state, mesh), by_rows(mesh)),
            out_shardings=replicated(mesh),
            compiler_options=compiler_options(),
        ),
        checkpoint=jax.jit(
            to_checkpoint,
            out_shardings=checkpoint_shardings(jax.eval_shape(to_checkpoint, state), mesh),
        ),
    )


def _start(run: _Run, checkpoints: Checkpoints) -> TrainState:
    """The newest checkpoint's state, or a fresh one, dealt out to the devices."""
    state = abstract_state(run.config, run.rules, run.mesh)
    placed = shardings(state, run.mesh)
    step = checkpoints.latest_step()
    if step is None:
        return jax.jit(functools.partial(init_state, run.config, run.rules), out_shardings=placed)()
    saved = jax.eval_shape(to_checkpoint, state)
    saved = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        saved,
        checkpoint_shardings(saved, run.mesh),
    )
    weights, training = checkpoints.restore(step, weights=saved["weights"], training=saved["training"])
    restored = {"weights": weights, "training": training}
    return jax.jit(functools.partial(from_checkpoint, like=state), out_shardings=placed)(restored)


def _introduce(run: _Run, first_step: int, progress: ProgressLine) -> None:
    config = run.config
    device = run.mesh.devices.flat[0]
    tokens = config.data.batch_size * config.data.sequence_length
    progress.say(
        f"run {config.run_folder} on {run.mesh.size} x {device.device_kind}: "
        f"{config.train.num_steps:,} steps of {tokens:,} tokens from {run.corpus.folder}"
    )
    if first_step:
        progress.say(f"resuming at step {first_step} from {config.run_folder}/{FOLDER}")


def _loop(
    run: _Run, state: TrainState, checkpoints: Checkpoints, writer: MetricsWriter, progress: ProgressLine
) -> TrainResult:
    config, first_step = run.config, int(state.step)
    num_steps = config.train.num_steps
    clock = _Clock()
    for step, batch in _numbered_batches(run, first_step):
        rows = jax.device_put(batch, by_rows(run.mesh))
        with jax.transfer_guard("disallow"):
            state, metrics = run.step(state, rows)
        due = step == 1 or step == num_steps or step % config.train.log_every == 0
        if due or step == first_step + 1:  # a resumed run shows at once that it lives
            values = _train_values(run, jax.device_get(metrics), batch, clock.lap(step))
            progress.update(step, values)
            if due:
                writer.write(step, "train", values)
        if step == num_steps or step % config.train.eval_every == 0:
            _evaluate(run, state, step, writer, progress)
            clock.restart(step)
        if step == num_steps or step % config.train.checkpoint_every == 0:
            checkpoints.save(step, **run.checkpoint(state))
            clock.restart(step)
    return _result(run, state)


def _result(run: _Run, state: TrainState) -> TrainResult:
    held_out = read_metrics(run.config.run_folder, "validation")[-1]["bits_per_byte"]
    return TrainResult(run.config, run.corpus, run.rules, state, held_out)


def _numbered_batches(run: _Run, first_step: int) -> Iterator[tuple[int, Batch]]:
    """Batches with the number of the step that each makes, from 1."""
    remaining = run.config.train.num_steps - first_step
    batches = training_batches(run.corpus, run.config.data, first_step=first_step, num_steps=remaining)
    yield from enumerate(batches, start=first_step + 1)


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


def _train_values(run: _Run, metrics: Metrics, batch: Batch, seconds: float) -> dict[str, float]:
    """The scalars of a step, for people and files."""
    config = run.config
    length = config.data.sequence_length
    tokens_per_second = batch.tokens_BT.size / seconds
    nats = float(metrics.loss) * float(metrics.num_targets)
    num_bytes = text_bytes(np.asarray(batch.targets_BT), np.asarray(batch.weights_BT), run.token_bytes_V)
    counts_LX = metrics.router_counts_LX
    values = {
        "loss": float(metrics.loss),
        "bits_per_byte": bits_per_byte(nats, num_bytes),
        "gradient_norm": float(metrics.gradient_norm),
        "load_entropy": float(np.mean(load_entropy(counts_LX))),
        "router_entropy": float(np.mean(metrics.router_entropy_L)),
        "router_probability": float(np.mean(metrics.router_probability_L)),
        "skipped": float(counts_LX[:, -1].sum() / counts_LX.sum()),
        "largest_load": float(np.max(expert_loads(counts_LX))),
        "smallest_load": float(np.min(expert_loads(counts_LX))),
        "dead_experts": float(np.sum(counts_LX[:, :-1] == 0)),
        "logit_bound": float(metrics.logit_bound),
        "skipped_steps": float(metrics.skipped_steps),
        **{f"gradient_norm/{group}": float(norm) for group, norm in metrics.gradient_norms.items()},
        **{f"update_norm/{group}": float(norm) for group, norm in metrics.update_norms.items()},
        "tokens_per_second": tokens_per_second,
    }
    peak = peak_flops(run.mesh.devices.flat[0].device_kind)
    if peak is not None:
        flops = train_flops_per_token(config.model, length) * tokens_per_second
        values["model_flops_utilisation"] = flops / (peak * run.mesh.size)
    return values


def _evaluate(run: _Run, state: TrainState, step: int, writer: MetricsWriter, progress: ProgressLine) -> None:
    """Says and writes down the held-out loss."""
    config = run.config
    nats = num_bytes = num_targets = 0.0
    for batch in evaluation_batches(
        run.corpus,
        split="validation",
        sequence_length=config.data.sequence_length,
        batch_size=config.data.batch_size,
        limit=config.train.eval_sequences,
    ):
        sums = run.evaluate(state, jax.device_put(batch, by_rows(run.mesh)))
        nats += float(sums.loss)
        num_targets += float(sums.num_targets)
        num_bytes += text_bytes(np.asarray(batch.targets_BT), np.asarray(batch.weights_BT), run.token_bytes_V)
    values = {"loss": nats / max(num_targets, 1), "bits_per_byte": bits_per_byte(nats, num_bytes)}
    writer.write(step, "validation", values)
    progress.say(f"step {step}: held-out loss {values['loss']:.4f}, {values['bits_per_byte']:.4f} bits/byte")
