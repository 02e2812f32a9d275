"""`zaya bench torch`: our train step against Hugging Face's model, with the same weights on the same machine.

Each program runs in its own process, set up as its users do: ours as in `zaya train`, theirs as `import
transformers` leaves it, and theirs again under `torch.compile`. The programs alternate with each other and
with the matrix product that serves as the ceiling.
"""

import dataclasses
import functools
import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.interleaved import Program, best_interleaved
from zaya_jax.bench.measure import CEILING_FLOPS, ceiling_matmul
from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.convert.pytorch.huggingface import config_to_huggingface, variables_from_huggingface
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.errors import UserError
from zaya_jax.model.flops import forward_flops_per_token
from zaya_jax.model.weights import count_parameters
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.platform.host_memory import reuse_host_memory
from zaya_jax.platform.shell import pip_install
from zaya_jax.text_tables import name_column, number_column
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import first_state, make_setup, shardings

MODEL = ModelConfig(
    vocab_size=8192,
    hidden_size=512,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    moe_intermediate_size=512,
    num_experts=8,
    router_hidden_size=64,
    max_position_embeddings=4096,
)
EXECUTION = ExecutionConfig(dtype="float32")
BATCH, LENGTH = 8, 256
COMPILE_SECONDS = 1800.0
"""Timeout for preparing a program: `torch.compile` generates and compiles C++."""


def run(*, rounds: int) -> None:
    """Times a train step of both, and prints the results.

    Raises:
      UserError: if torch or transformers is not installed.
    """
    require_transformers()
    # Tried first, because compiling the whole network would fail only after minutes.
    why_not = why_not_run("torch.compile", compile_a_sum)
    programs: dict[str, Program] = {"ours": our_training, "transformers": their_training}
    programs |= {} if why_not else {"torch.compile": functools.partial(their_training, compiled=True)}
    # The ceiling alternates with the programs, so that a slow period of the machine affects all of them.
    programs |= {"ceiling": ceiling_matmul}
    report(best_interleaved(programs, rounds=rounds, limit=COMPILE_SECONDS), rounds=rounds, why_not=why_not)


def report(seconds: dict[str, float], *, rounds: int, why_not: str | None) -> None:
    """Prints tokens per second of each program, and its share of this machine's matmul ceiling.

    Args:
      seconds: time of a step of each program, and of a product under "ceiling".
      rounds: number of timings, of which the best counted.
      why_not: reason why `torch.compile` was not measured; None if it was.
    """
    tokens, ceiling = BATCH * LENGTH, CEILING_FLOPS / seconds["ceiling"]
    # Three times the forward pass: the backward pass computes two gradients for each product.
    flops = 3 * tokens * math.fsum(forward_flops_per_token(MODEL, LENGTH).values())
    # A ratio above 1 means that our step is faster than that of the row.
    columns = map(number_column, ("tokens/s", "ours is faster by", "of the ceiling"))
    table = Table(name_column("train step"), *columns, caption=why_not)
    for name, step in seconds.items():
        if name != "ceiling":
            ratio, share = f"{step / seconds['ours']:.2f}x", f"{flops / step / ceiling:.1%}"
            table.add_row(name, f"{tokens / step:,.1f}", ratio, share)
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{count_parameters(MODEL):,} parameters, float32, batch {BATCH} x {LENGTH}, clipped AdamW; best of "
        f"{rounds}, alternating, each in its own process. transformers runs in eager mode, and again under "
        "torch.compile with its defaults"
    )
    console.print(table)
    console.print(f"ceiling: {ceiling / 1e9:,.0f} GFLOP/s, a float32 product of 2048 x 2048")


def require_transformers() -> None:
    """Checks that the libraries of the comparison are installed.

    Raises:
      UserError: if one is missing.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise UserError(
                f"the comparison needs {package}, which is not installed: "
                f"{pip_install('torch', 'transformers')}"
            )


def why_not_run(name: str, program: Program) -> str | None:
    """Returns why a program that uses `torch.compile` does not work here; None if it works."""
    try:
        best_interleaved({name: program}, rounds=1, limit=COMPILE_SECONDS)
    except RuntimeError as error:
        first_line = re.split(r"\n|\\n", str(error))[0]  # a nested exception has escaped line ends
        return f"torch.compile is skipped, because it fails here: {first_line}"
    return None


def compile_a_sum() -> Callable[[], Any]:
    """The smallest use of `torch.compile`: it fails if there is no C++ compiler."""
    import torch

    return functools.partial(torch.compile(lambda x: x + x), torch.ones(3))


def our_training() -> Callable[[], Any]:
    """Returns a call of a clipped AdamW step. The process keeps freed memory, as `zaya train` does."""
    reuse_host_memory()
    config = Config(
        model=MODEL,
        data=DataConfig(sequence_length=LENGTH, batch_size=BATCH),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-5, warmup_steps=0),
        train=TrainConfig(num_steps=1000, update_norms=False),  # transformers computes none either
        execution=dataclasses.replace(EXECUTION, scan_layers=False),
    )
    setup, mesh = make_setup(config), data_mesh(jax.devices()[:1])
    state = first_state(setup, _our_variables()["params"], jax.random.key(0))
    states = [jax.device_put(state, shardings(state, mesh))]  # otherwise the second step compiles again
    batch = jax.device_put(make_example(_tokens(), delimiters=NO_DELIMITERS))
    step = compiled_step(states[0], setup=setup, mesh=mesh)

    def train():
        # The step donates its state.
        states[0], metrics = step(states[0], batch)
        return metrics.loss

    return train


def their_training(*, compiled: bool = False) -> Callable[[], Any]:
    """Returns a call of a clipped AdamW step; `compiled` applies to the model's forward and backward pass."""
    import torch

    # The same weights as ours, because the routing and so the work of the experts depend on them.
    model, tokens = _huggingface_model().train(), torch.from_numpy(_tokens())
    if compiled:
        model.compile()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def train():
        adamw.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()

    return train


def _huggingface_model() -> Any:
    """Builds transformers' model, with the same weights in each process."""
    import torch
    from transformers import ZayaConfig, ZayaForCausalLM

    # Both programs build this model in their own processes: the seed makes the weights equal.
    torch.manual_seed(0)
    model = ZayaForCausalLM(ZayaConfig(**config_to_huggingface(MODEL)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("temp"):
                # [HF] initializes them to zero for a checkpoint to fill; all keys would be 0.
                parameter.fill_(1.0)
    return model


def _our_variables() -> Any:
    """Our variables with transformers' weights."""
    tensors = {name: tensor.numpy() for name, tensor in _huggingface_model().state_dict().items()}
    return jax.device_put(variables_from_huggingface(MODEL, tensors))


def _tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(1, MODEL.vocab_size, (BATCH, LENGTH))
