"""The loss of a run on text that it does not learn from."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from zaya_jax.config import StepRange
from zaya_jax.data.batch import Batch
from zaya_jax.data.loader import evaluation_batches, num_sequences
from zaya_jax.parallel import hosts
from zaya_jax.parallel.mesh import place_rows
from zaya_jax.train.metrics import bits_per_byte, text_loss
from zaya_jax.train.opening import OpenRun
from zaya_jax.train.step import Sums


def evaluate(
    run: OpenRun, step_range: StepRange, sums_of: Callable[[Batch], Sums], batches: Iterable[Batch]
) -> dict[str, float]:
    """The loss of batches in nats a token and in bits a byte.

    Args:
      run: that is evaluated.
      step_range: whose devices it is evaluated on.
      sums_of: the forward pass of a batch on the run's devices.
      batches: on the host.
    """
    # Python's floats: in float32 the sum over a large split would lose its last batches.
    loss = num_bytes = num_targets = 0.0
    preferences: dict[str, float] = defaultdict(float)
    for batch in batches:
        sums = sums_of(place_rows(batch, run.mesh_of(step_range.phase.config)))
        loss += float(sums.loss)
        num_targets += float(sums.num_targets)
        num_bytes += run.text_bytes(batch)
        # None where the next token is learned.
        for name, value in sums.preferences.items():
            preferences[name] += float(value)
    num_bytes = sum(hosts.gather("held-out bytes", num_bytes))  # each process has counted those of its share
    # Bits a byte, so that runs with different tokenizers can be compared.
    means = {name: value / max(num_targets, 1) for name, value in {"loss": loss, **preferences}.items()}
    return means | {"bits_per_byte": bits_per_byte(text_loss(loss, preferences), num_bytes)}


def held_out_batches(run: OpenRun, step_range: StepRange) -> tuple[Iterator[Batch], int]:
    """The batches, and how many they are; each is as large as the phase's full batch."""
    # Full batches in a ramp too, so that held-out losses of all its steps are sums over the same batches.
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
    )
    return run.extensions.of_batches(batches), math.ceil(min(sequences, limit or sequences) / data.batch_size)
