"""`zaya bench torch`: this model against Hugging Face's, with the same weights on the same machine.

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
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich import box
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
from zaya_jax.model.zaya import Output, Zaya
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.platform.compiler import compiler_options
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
COMPARED = (
    "transformers runs in eager mode; compiled means torch.compile with its defaults. A ratio is ours to the "
    "column on its left; the targets are for eager transformers."
)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One comparison.

    Attributes:
      aim: target ratio to eager transformers.
      ours: our program.
      theirs: transformers in eager mode.
      compiled: transformers under `torch.compile`.
      tokens: tokens per call.
      flops_per_token: useful FLOPs per token.
    """

    aim: str
    ours: Program
    theirs: Program
    compiled: Program
    tokens: int
    flops_per_token: float


def run(*, rounds: int) -> None:
    """Prints tokens per second of both, their ratio, and the share of this machine's matmul ceiling.

    Raises:
      UserError: if torch or transformers is not installed.
    """
    require_transformers()
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{count_parameters(MODEL):,} parameters, float32, batch {BATCH} x {LENGTH}, AdamW on all sides; "
        f"best of {rounds}, alternating, each in its own process. {COMPARED}"
    )
    # Tried before the table, because each of its programs would fail only after minutes.
    why_not = why_not_run("torch.compile", compile_a_sum)
    columns = ("ours,\ntokens/s", "trans-\nformers", "ratio", "target", "com-\npiled", "ratio")
    columns = (*columns, "ours of\nceiling", "theirs of\nceiling")
    table = Table(
        name_column("what"), *map(number_column, columns), box=box.SIMPLE_HEAD, padding=0, caption=why_not
    )
    ceilings = []
    for name, row in _rows().items():
        seconds = _time(name, row, rounds, with_compiled=why_not is None)
        ceilings.append(CEILING_FLOPS / seconds["ceiling"])
        table.add_row(name, *_cells(row, seconds))
    console.print(table)
    of_rows = ", ".join(f"{ceiling / 1e9:,.0f}" for ceiling in ceilings)
    console.print(f"ceiling: {of_rows} GFLOP/s, a float32 product of 2048 x 2048, alternating with each row")


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


def _time(name: str, row: _Row, rounds: int, *, with_compiled: bool) -> dict[str, float]:
    """Seconds per call of each program and of the ceiling."""
    sides = {"ours": row.ours, "transformers": row.theirs}
    sides |= {"compiled": row.compiled} if with_compiled else {}
    # The names of the programs appear in errors, which must say which row has failed.
    programs = {f"{name}, {side}": program for side, program in sides.items()}
    # The ceiling alternates with the programs, so that a slow period of the machine affects all of them.
    times = best_interleaved(programs | {"ceiling": ceiling_matmul}, rounds=rounds, limit=COMPILE_SECONDS)
    return {title.removeprefix(f"{name}, "): seconds for title, seconds in times.items()}


def _cells(row: _Row, seconds: dict[str, float]) -> tuple[str, ...]:
    """Cells of a row after its name."""
    ours, theirs = seconds["ours"], seconds["transformers"]
    compiled = ("", "")
    if "compiled" in seconds:
        compiled = f"{row.tokens / seconds['compiled']:,.1f}", f"{seconds['compiled'] / ours:.2f}x"
    # Time that the row's useful FLOPs would take at the ceiling.
    ceiling = seconds["ceiling"] / CEILING_FLOPS * row.tokens * row.flops_per_token
    rates = f"{row.tokens / ours:,.1f}", f"{row.tokens / theirs:,.1f}"
    shares = f"{ceiling / ours:.1%}", f"{ceiling / theirs:.1%}"
    return *rates, f"{theirs / ours:.2f}x", row.aim, *compiled, *shares


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


def _rows() -> dict[str, _Row]:
    of_batch = math.fsum(forward_flops_per_token(MODEL, LENGTH).values())
    return {
        "forward": _Row("1.3x", our_forward, their_forward, compiled_forward, BATCH * LENGTH, of_batch),
        # Three times the forward pass: the backward pass computes two gradients for each product.
        "train step": _Row(
            "1.5x", our_training, their_training, compiled_training, BATCH * LENGTH, 3 * of_batch
        ),
    }


def our_forward() -> Callable[[], Any]:
    """Returns a call of our compiled forward pass, which computes the logits of the batch."""
    variables, tokens = _our_variables(), jnp.asarray(_tokens((BATCH, LENGTH)))
    apply = jax.jit(
        lambda variables, tokens: _ours(variables, tokens).logits_BTV, compiler_options=compiler_options()
    )
    return lambda: apply(variables, tokens)


def their_forward(*, compiled: bool = False) -> Callable[[], Any]:
    """Returns a call of transformers' forward pass on the same batch, without gradients."""
    import torch

    model, tokens = _huggingface_model().eval(), torch.from_numpy(_tokens((BATCH, LENGTH)))
    if compiled:
        model.compile()

    # Otherwise torch would keep activations for a backward pass that never comes.
    @torch.no_grad()
    def forward():
        model(tokens)

    return forward


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
    batch = jax.device_put(make_example(_tokens((BATCH, LENGTH)), delimiters=NO_DELIMITERS))
    step = compiled_step(states[0], setup=setup, mesh=mesh)

    def train():
        # The step donates its state.
        states[0], metrics = step(states[0], batch)
        return metrics.loss

    return train


def their_training(*, compiled: bool = False) -> Callable[[], Any]:
    """Returns a call of a clipped AdamW step; `compiled` applies to the model's forward and backward pass."""
    import torch

    model, tokens = _huggingface_model().train(), torch.from_numpy(_tokens((BATCH, LENGTH)))
    if compiled:
        model.compile()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def train():
        adamw.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()

    return train


compiled_forward = functools.partial(their_forward, compiled=True)
compiled_training = functools.partial(their_training, compiled=True)


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
                parameter.fill_(
                    1.0
                )  # [HF] initializes them to zero for a checkpoint to fill; all keys would be 0
    # The random network may predict the end token at any time, which would shorten the work.
    model.generation_config.eos_token_id = None
    return model


def _our_variables() -> Any:
    """Our variables with transformers' weights."""
    tensors = {name: tensor.numpy() for name, tensor in _huggingface_model().state_dict().items()}
    return jax.device_put(variables_from_huggingface(MODEL, tensors))


def _ours(variables: Any, tokens: jax.Array) -> Output:
    return cast(Output, Zaya(MODEL, EXECUTION).apply(variables, tokens))


def _tokens(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(1, MODEL.vocab_size, shape)
