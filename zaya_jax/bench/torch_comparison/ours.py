"""Our side of `zaya bench torch`: each function prepares a program in its own process."""

import dataclasses
import time
from collections.abc import Callable, Mapping

import jax
import numpy as np

from zaya_jax.bench.torch_comparison.workload import (
    MODEL,
    TOKENS,
    Call,
    GenerationWork,
    TrainingWork,
    execution,
)
from zaya_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from zaya_jax.convert.pytorch.in_memory import load_pytorch
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.inference.engine.decoder import cast_matrices
from zaya_jax.inference.engine.generate import generate_in_chunks
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.platform.host_memory import reuse_host_memory, use_large_pages
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import first_state, make_setup, shardings


def train(workload: TrainingWork) -> Callable[[], Call]:
    """Returns a call of a clipped AdamW step. The process keeps freed memory, as `zaya train` does."""
    reuse_host_memory()
    config = Config(
        model=MODEL,
        data=DataConfig(sequence_length=workload.length, batch_size=workload.batch),
        optimizer=OptimizerConfig(name="adamw", learning_rate=workload.learning_rate, warmup_steps=0),
        train=TrainConfig(num_steps=1000, update_norms=False),  # transformers computes none either
        execution=dataclasses.replace(execution(workload), scan_layers=False),
    )
    setup, mesh = make_setup(config), data_mesh(jax.devices()[:1])
    _, variables = load_pytorch(workload.folder, execution=execution(workload))
    state = first_state(setup, jax.device_put(variables["params"]), jax.random.key(0))
    states = [jax.device_put(state, shardings(state, mesh))]  # otherwise the second step compiles again
    # On the device before the first call, as the loader has it during training.
    batch = jax.device_put(make_example(workload.tokens, delimiters=NO_DELIMITERS))
    step = compiled_step(states[0], setup=setup, mesh=mesh)

    def call() -> Call:
        start = time.perf_counter()
        # The step donates its state.
        states[0], metrics = step(states[0], batch)
        jax.block_until_ready(states[0])
        seconds = time.perf_counter() - start
        return Call({"train": seconds}, {"loss": np.asarray(metrics.loss)})

    return call


def generate(workload: GenerationWork) -> Callable[[], Call]:
    """Returns a call that continues the prompts: a prefill, then one compiled loop over all tokens."""
    model, variables = _network(workload)
    prompts, params = workload.prompts.tolist(), SamplingParams(max_new_tokens=workload.new)

    def call() -> Call:
        moments, chunks = [time.perf_counter()], []
        for texts in generate_in_chunks(model, variables, prompts, params, chunk=workload.new - 1):
            moments.append(time.perf_counter())
            chunks.append(texts)
        prefill, decode = np.diff(moments).tolist()
        # Both come from the timed path itself, so that its own arithmetic is compared.
        outputs = {
            TOKENS: np.array([each.tokens for each in chunks[-1]]),
            "log-probabilities": np.array([each.logprobs for each in chunks[-1]]),
        }
        return Call({"prefill": prefill, "decode": decode}, outputs)

    return call


def _network(workload: GenerationWork) -> tuple[Zaya, Mapping]:
    model, variables = load_pytorch(workload.folder, execution=execution(workload))
    # Before the first call, whose time must not include the transfer.
    variables = jax.device_put(cast_matrices(model, variables))
    use_large_pages(variables)  # as `load_for_generation` does
    return model, variables
