"""Evaluations during training: the held-out loss, and tasks."""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping

from zaya_jax.config import StepRange
from zaya_jax.data.corpora.held_out_bytes import held_out_text_bytes
from zaya_jax.data.reading.batch import Batch
from zaya_jax.data.reading.loader import evaluation_batches, num_sequences
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import place_rows
from zaya_jax.parallel.processes import hosts
from zaya_jax.run_folder.names import TASKS, VALIDATION
from zaya_jax.train import heartbeats as sections
from zaya_jax.train.compiled_programs import whole_variables
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.metrics.files import bits_per_byte, text_loss
from zaya_jax.train.setup import PreparedRun
from zaya_jax.train.step.dpo import preference_means
from zaya_jax.train.step.state import TrainState
from zaya_jax.train.step.train_step import Sums

TasksFunction = Callable[[int, Zaya, Mapping], Mapping[str, float]]
"""Maps a step, the network and its weights to scores by name."""


class Evaluation(Hook):
    """Evaluates the held-out loss every `train.eval_every` steps and at the end of each phase."""

    def on_step_end(self, context: StepContext) -> None:
        """Evaluates when it is due."""
        # The end of a phase always counts: another run may start from its checkpoint.
        if not context.ends_phase and context.step % context.config.train.eval_every:
            return
        values = _evaluate_state(context, context.state)
        # A second pass with the same program, which gathers one set of weights at a time.
        if context.state.ema is not None:
            of_average = _evaluate_state(context, context.state.averaged)
            values |= {f"ema/{name}": value for name, value in of_average.items()}
        context.emit(Hook.on_evaluate, VALIDATION, values)
        context.clock.restart(context.step)


def _evaluate_state(context: StepContext, state: TrainState) -> dict[str, float]:
    """Returns the held-out values of a state, with the structure of the run's own."""
    # One section per batch, so that a time limit does not depend on their number. The first may compile.
    names = itertools.chain([sections.COMPILE], itertools.repeat(sections.EVALUATE))

    def sums_of(batch: Batch) -> Sums:
        context.heartbeats.enter(next(names), context.step)
        return context.programs.evaluate(state, batch)

    # The batches are read ahead in threads while devices evaluate.
    batches, num_batches = held_out_batches(context.run, context.range)
    batches = context.progress.evaluating(context.step, batches, num_batches)
    return evaluate(context.run, context.range, sums_of, batches)


class EvaluationTasks(Hook):
    """Scores tasks every `tasks.every` steps and at the end of each phase. A failure does not end the run.

    Args:
      score: called in all processes with a step, the network and all its weights on every device; returns
        scores by name, the same in all processes. A ValueError or OSError, raised in all processes, is
        reported, and training continues.
    """

    def __init__(self, score: TasksFunction):
        self._score = score

    def on_step_end(self, context: StepContext) -> None:
        """Scores the tasks when they are due."""
        step = context.step
        if not context.ends_phase and step % context.config.tasks.every:
            return
        context.heartbeats.enter(sections.TASKS, step)
        # Replicated: each device scores its own requests with all weights.
        variables = whole_variables(context.state, context.mesh)
        try:
            scores = dict(self._score(step, context.run.setup(context.phase_config).model, variables))
        except (ValueError, OSError) as error:  # also of other packages, which do not raise UserError
            context.progress.say(f"step {step}: the tasks failed, and training continues: {error}")
        else:
            context.emit(Hook.on_evaluate, TASKS, scores)
        context.clock.restart(step)


def evaluate(
    run: PreparedRun, step_range: StepRange, sums_of: Callable[[Batch], Sums], batches: Iterable[Batch]
) -> dict[str, float]:
    """Returns the mean loss in nats per target, the mean preference metrics, and bits per byte.

    Args:
      run: the run whose model is evaluated.
      step_range: current range of steps, which determines devices and sequence length.
      sums_of: forward pass of one batch on the run's devices.
      batches: held-out batches, on the host.
    """
    # Python floats: in float32 the sum over a large split would lose its last batches.
    loss = spelled_bytes = num_targets = 0.0
    num_bytes = _held_out_bytes(run, step_range)
    preferences: dict[str, float] = defaultdict(float)
    for batch in batches:
        sums = sums_of(place_rows(batch, run.mesh_of(step_range.phase.config)))
        loss += float(sums.loss)
        num_targets += float(sums.num_targets)
        spelled_bytes += run.text_bytes(batch) if num_bytes is None else 0
        # Empty for next-token training.
        for name, value in sums.preferences.items():
            preferences[name] += float(value)
    if num_bytes is None:  # each process has counted its share
        num_bytes = hosts.reduce("held-out bytes", spelled_bytes, sum)
    means = {"loss": loss / max(num_targets, 1), **preference_means(preferences, num_targets)}
    # Bits per byte, so that runs with different tokenizers can be compared.
    return means | {"bits_per_byte": bits_per_byte(text_loss(loss, preferences), num_bytes)}


def _held_out_bytes(run: PreparedRun, step_range: StepRange) -> int | None:
    """Returns the bytes of the held-out text; None if only the bytes that tokens spell are known.

    They are unknown for chats, whose batches have tokens without weight, for batches that an extension
    changes, and for a part of the held-out split of an older corpus.
    """
    if run.corpus.chat_template is not None or run.extensions.batch is not None:
        return None
    limit = run.config.train.eval_sequences
    length = step_range.phase.config.data.sequence_length
    return held_out_text_bytes(run.corpus, limit and limit * length)


def held_out_batches(run: PreparedRun, step_range: StepRange) -> tuple[Iterator[Batch], int]:
    """Returns the held-out batches, each as large as the phase's full batch, and their number."""
    # Full batches during a batch ramp too, so that all held-out losses are sums over the same batches.
    data, limit = step_range.phase.config.data, run.config.train.eval_sequences
    sequences = num_sequences(run.corpus, "validation", data.sequence_length)
    batches = evaluation_batches(
        run.corpus,
        split="validation",
        sequence_length=data.sequence_length,
        batch_size=data.batch_size,
        limit=limit,
        share=run.share_of(step_range.phase.config, data.batch_size),
        num_threads=step_range.phase.config.execution.read_threads,
        reference=run.held_out_reference,
        teacher=run.held_out_teacher,
    )
    return run.extensions.of_batches(batches), math.ceil(min(sequences, limit or sequences) / data.batch_size)
