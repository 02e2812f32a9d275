"""`zaya bench loss-memory`: memory of a train step whose loss computes all logits at once, or in chunks."""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.interleaved import run_module
from zaya_jax.bench.process_memory import resident_memory
from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import Batch, make_example
from zaya_jax.plan.compiled.train_program import lower_train_step
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.text_tables import format_bytes, number_column
from zaya_jax.train.step.state import TrainState, init_state, make_setup

TOKENS, LENGTH, VOCABULARY = 16_384, 4096, 262_272
"""Tokens per step and per sequence, and ZAYA1's vocabulary size."""
WIDTH = 64
"""Width of the network, which has one layer: narrow, so that the logits dominate the memory.

The logits of 512 tokens are 8 times as large as the embedding, its gradient or one of its moments. The
products with the embedding are 1.6 TFLOP per step, and 32 times as much at ZAYA1-8B's width.
"""
CHUNKS = (TOKENS, 2048, 512)
MEMORY_SHARE = 0.85
"""Share of the available memory that a step may use. Other processes use some meanwhile, and when memory runs
out, Linux kills a process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Memory of a step in bytes.

    Attributes:
      chunk: tokens whose logits exist at the same time.
      logits: size of the logits of all tokens.
      temporaries: temporary buffers of the compiled step.
      arguments: size of state and batch.
      needed: total of arguments, temporaries, and results that do not alias arguments.
      available: available host memory before the state is created.
      resident: resident memory of the process before the step; None if the step did not run.
      added: peak memory that the step added; None if the step did not run.
    """

    chunk: int
    logits: int
    temporaries: int
    arguments: int
    needed: int
    available: int
    resident: int | None = None
    added: int | None = None


def run() -> None:
    """Compiles the step for each chunk size, runs those that fit, and prints their memory.

    Each runs in its own process, so that no memory is left over from another one.
    """
    # Only on a CPU are the buffers of a step part of the process's resident memory.
    cpu = {"JAX_PLATFORMS": "cpu"}
    report([StepMemory(**run_module(__name__, str(chunk), environment=cpu)) for chunk in CHUNKS])


def report(steps: list[StepMemory]) -> None:
    """Prints a table of the steps, and why some of them did not run."""
    columns = ("chunk", "temporaries", "all logits", "state and\nbatch", "process\nbefore", "step adds")
    title = "memory of a train step on this CPU by tokens per chunk, compiled and measured"
    table = Table(*map(number_column, columns), title=title)
    for step in steps:
        sizes = (step.temporaries, step.logits, step.arguments, step.resident, step.added)
        table.add_row(f"{step.chunk:,}", *("-" if size is None else format_bytes(size) for size in sizes))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for step in steps:
        if step.added is None:
            console.print(
                f"{step.chunk:,} tokens per chunk: compiled only, because it does not fit: the step needs "
                f"{format_bytes(step.needed)}, and the limit is {MEMORY_SHARE:.0%} of the available "
                f"{format_bytes(step.available)}"
            )


def narrow_config(
    chunk: int, *, tokens: int = TOKENS, length: int = LENGTH, vocab_size: int = VOCABULARY
) -> Config:
    """Returns the config of a step with the given number of tokens."""
    return Config(
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=WIDTH,
            # One narrow layer, so that the logits dominate the memory of the step.
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=WIDTH // 2,
            moe_intermediate_size=WIDTH,
            num_experts=4,
            router_hidden_size=WIDTH // 4,
        ),
        data=DataConfig(sequence_length=length, batch_size=tokens // length),
        optimizer=OptimizerConfig(warmup_steps=0),
        execution=ExecutionConfig(dtype="float32", remat="layer", loss_chunk=chunk),
    )


def measure(config: Config, *, available: int) -> StepMemory:
    """Compiles a step for one device, and runs it once if it fits.

    Args:
      config: config of the run.
      available: available bytes of host memory.
    """
    # Compiling needs no memory for the state: only a step that fits allocates it.
    compiled = lower_train_step(jax.devices()[:1], config=dataclasses.asdict(config)).compile()
    memory: Any = compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    step = StepMemory(
        chunk=config.execution.loss_chunk,
        # Logits are float32, 4 bytes each.
        logits=4 * config.data.batch_tokens * config.model.vocab_size,
        temporaries=temporaries,
        arguments=arguments,
        # Aliased outputs reuse the memory of arguments.
        needed=arguments + temporaries + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        available=available,
    )
    # Otherwise the kernel would kill this process, and with it the figures of the compiled program.
    if step.needed > MEMORY_SHARE * available:
        return step
    state, batch = jax.block_until_ready(_state_and_batch(config))
    resident, added = resident_memory(lambda: compiled(state, batch))
    return dataclasses.replace(step, resident=resident, added=added)


def _state_and_batch(config: Config) -> tuple[TrainState, Batch]:
    """Returns the initial state and a batch of random tokens."""
    shape = config.data.batch_size, config.data.sequence_length
    tokens = np.random.default_rng(0).integers(1, config.model.vocab_size, shape)
    state = jax.jit(lambda: init_state(config, make_setup(config)))()
    return state, make_example(tokens, delimiters=NO_DELIMITERS)


if __name__ == "__main__":
    measured = measure(narrow_config(int(sys.argv[1])), available=available_memory())
    print(json.dumps(dataclasses.asdict(measured)))
