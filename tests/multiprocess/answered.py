"""Scores requests and continues prompts on all devices; process 0 writes the results.

usage: answered.py OUT
"""

import json
import os
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
from small_models import EXECUTION, SLIDING

from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.evaluation.device_pool import make_replicas
from zaya_jax.inference.evaluation.remote_scoring import PromptBatch, shared_workers
from zaya_jax.inference.evaluation.scoring import Scorer, score, scored_batches
from zaya_jax.inference.evaluation.scoring_requests import ScoringRequest
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import CollectiveError
from zaya_jax.parallel.processes.process_group import find_process_group


def main(out: str) -> None:
    try:
        with hosts.joined(find_process_group(os.environ), limit_seconds=300.0), all_devices() as workers:
            if workers is not None:
                pathlib.Path(out).write_text(json.dumps(ask(workers)))
                ask_what_cannot_be(workers)
    except CollectiveError as error:
        if error.is_printed_here:
            sys.stderr.write(f"{error}\n")
        sys.exit(2)


def all_devices():
    """Makes replicas of a small network."""
    model = Zaya(SLIDING, EXECUTION)
    variables = jax.jit(model.init)(jax.random.key(11), jnp.zeros((1, 4), jnp.int32))
    replicas = make_replicas(model, variables, jax.local_devices())
    return shared_workers(replicas, ByteTokenizer(), limit_seconds=300.0)


def ask(workers) -> dict:
    """Requests of all kinds."""
    scorer = Scorer(workers, 32, 2, num_rows=2)
    requests = some_requests()
    return {
        "devices": list(workers.processes),
        "scores": [[each.log_prob, each.is_greedy] for each in score(scorer, requests)],
        "positions": [batch.log_prob_J for batch in scored_batches(scorer, requests)],
        "texts": list(workers.map(_writings())),
    }


def some_requests() -> list[ScoringRequest]:
    """Prompts of all lengths; more batches than devices."""
    numbers = np.random.default_rng(3)
    sizes = numbers.integers(2, 34, 40)
    return [
        ScoringRequest(numbers.integers(0, 61, size).astype(np.int32), int(numbers.integers(1, size)))
        for size in sizes
    ]


def _writings() -> list[PromptBatch]:
    """Greedy and sampled generations; one has a stop string."""
    settings = {}, {"temperature": 1.0, "seed": 5}
    return [
        PromptBatch(
            [[2, 9 + i, 7], [2, 30]],
            SamplingParams(max_new_tokens=6, stop=("0",) if i == 2 else (), **settings[i % 2]),
            ByteTokenizer(),
        )
        for i in range(6)
    ]


def ask_what_cannot_be(workers) -> None:
    """Work that fails on the last device."""
    good = PromptBatch([[2]], SamplingParams(max_new_tokens=1), ByteTokenizer())
    bad = PromptBatch([[61]], SamplingParams(max_new_tokens=1), ByteTokenizer())
    list(workers.map([*[good] * (len(workers.processes) - 1), bad]))


if __name__ == "__main__":
    main(sys.argv[1])
