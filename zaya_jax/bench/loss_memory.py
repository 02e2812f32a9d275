"""`zaya bench loss-memory`: the memory of a train step whose loss has all logits at once, or a chunk's."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig
from zaya_jax.data.batch import Batch, make_example
from zaya_jax.data.borders import NO_BORDERS
from zaya_jax.plan.train_program import lower_train_step
from zaya_jax.platform.host_memory import available_memory
from zaya_jax.tables import format_bytes, number_column
from zaya_jax.train.state import TrainState, init_state, make_setup

TOKENS, LENGTH, VOCABULARY = 16_384, 4096, 262_272
"""Of a step, in sequences of LENGTH, and of ZAYA1."""
WIDTH = 64
"""Of the network, which has one layer: narrow, so that the logits are what counts.

The logits of 512 tokens are 8 times as large as the embedding, its gradient or one of its moments. The
products with it are 1.6 TFLOP a step, and 32 times as much at ZAYA1-8B's width.
"""
CHUNKS = (TOKENS, 2048, 512)
SHARE = 0.85
"""Of the available memory, which a step may take. Others use some while it runs, and where there is none
left, Linux ends a process."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepMemory:
    """What a step needs, in bytes.

    Attributes:
      chunk: tokens whose logits exist at the same time.
      logits: of all tokens.
      temporaries: that the compiled step has on its device.
      arguments: state and batch.
      needed: in all: arguments, temporaries, and results that do not take the place of arguments.
      available: memory of the host before there is a state.
      resident: of the process before the step; None if it did not run.
      added: to that by the step, at most; None if it did not run.
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
    """Compiles the step for each chunk, runs those that fit, and prints what they take.

    Each has a process of its own, so that none finds memory that another has left.
    """
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    steps = []
    for chunk in CHUNKS:
        command = [sys.executable, "-m", __name__, str(chunk)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        steps.append(StepMemory(**json.loads(done.stdout)))
    report(steps)


def report(steps: list[StepMemory]) -> None:
    """Prints a table of the steps, and why some of them did not run."""
    columns = ("chunk", "temporaries", "all logits", "state and\nbatch", "process\nbefore", "step adds")
    title = "a train step on this CPU, by tokens a chunk: as compiled, and the most as it ran"
    table = Table(*map(number_column, columns), title=title)
    for step in steps:
        sizes = (step.temporaries, step.logits, step.arguments, step.resident, step.added)
        table.add_row(f"{step.chunk:,}", *("-" if size is None else format_bytes(size) for size in sizes))
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    for step in steps:
        if step.added is None:
            console.print(
                f"{step.chunk:,} tokens a chunk: compiled only, it would not fit: the step needs "
                f"{format_bytes(step.needed)}, and may take {SHARE:.0%} of the "
                f"{format_bytes(step.available)} that are available"
            )


def narrow_config(
    chunk: int, *, tokens: int = TOKENS, length: int = LENGTH, vocab_size: int = VOCABULARY
) -> Config:
    """A step of so many tokens in sequences of a length."""
    return Config(
        model=ModelConfig(
            vocab_size=vocab_size,
            hidden_size=WIDTH,
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
    """Compiles the step of a config for one device, and runs it once if it fits.

    Args:
      config: of a run.
      available: bytes of memory that the host has to spare.
    """
    compiled = lower_train_step(jax.devices()[:1], config=dataclasses.asdict(config)).compile()
    memory: Any = compiled.memory_analysis()
    arguments, temporaries = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    step = StepMemory(
        chunk=config.execution.loss_chunk,
        logits=4 * config.data.batch_tokens * config.model.vocab_size,
        temporaries=temporaries,
        arguments=arguments,
        needed=arguments + temporaries + memory.output_size_in_bytes - memory.alias_size_in_bytes,
        available=available,
    )
    if step.needed > SHARE * available:
        return step
    state, batch = jax.block_until_ready(_state_and_batch(config))
    resident, added = resident_memory(lambda: compiled(state, batch))
    return dataclasses.replace(step, resident=resident, added=added)


def _state_and_batch(config: Config) -> tuple[TrainState, Batch]:
    """Before the first step; the tokens are random."""
    shape = config.data.batch_size, config.data.sequence_length
    tokens = np.random.default_rng(0).integers(1, config.model.vocab_size, shape)
    state = jax.jit(lambda: init_state(config, make_setup(config)))()
    return state, make_example(tokens, borders=NO_BORDERS)


def resident_memory(call: Callable[[], Any]) -> tuple[int, int]:
    """Bytes of this process in memory before a call, and what the call adds to them at most."""
    # Compiling had a peak, too: this one begins anew. And getrusage's maximum of a process goes back to
    # before its exec, to the memory of whoever started it.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    jax.block_until_ready(call())
    return before, _status("VmHWM") - before


def _status(field: str) -> int:
    """Bytes that the kernel says of this process (proc(5))."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":", 1) for line in lines)[field].split()[0]) * 1024


if __name__ == "__main__":
    measured = measure(narrow_config(int(sys.argv[1])), available=available_memory())
    print(json.dumps(dataclasses.asdict(measured)))
