"""`zaya bench torch`: this model against Hugging Face's, same weights, same machine, same minute.

Each side runs in a process of its own, set up as its users have it: ours as `zaya train` and `zaya
generate` do it, theirs as `import transformers` leaves it, and theirs once more under `torch.compile`.
They take turns, and so does the product of matrices that all are held against.
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

from zaya_jax.bench.measure import CEILING_FLOPS, ceiling_matmul
from zaya_jax.bench.turns import Program, best_in_turn
from zaya_jax.config import Config, DataConfig, ExecutionConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.convert.huggingface import config_to_huggingface, variables_from_huggingface
from zaya_jax.data.batch import make_example
from zaya_jax.data.borders import NO_BORDERS
from zaya_jax.inference.generate import generate
from zaya_jax.model.flops import forward_flops_per_token
from zaya_jax.model.weights import count_parameters
from zaya_jax.model.zaya import Output, Zaya
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.platform.compiler import compiler_options
from zaya_jax.platform.host_memory import reuse_host_memory
from zaya_jax.tables import name_column, number_column
from zaya_jax.train.programs import compiled_step
from zaya_jax.train.state import first_state, make_setup, shardings

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
PROMPT, NEW_TOKENS = 16, 64
COMPILE_SECONDS = 1800.0
"""That a process may take to get ready: `torch.compile` writes C++ and has it compiled."""
COMPARED = (
    "transformers is its eager self; compiled is the same under torch.compile, with torch's defaults, for "
    "the batches (generation grows its cache by a token a call, and would be compiled anew). A ratio is ours "
    "to the one on its left; the aims are for eager transformers."
)


@dataclasses.dataclass(frozen=True)
class _Row:
    """One comparison.

    Attributes:
      aim: of the ratio to eager transformers.
      ours: our side.
      theirs: transformers as it comes.
      compiled: transformers under `torch.compile`; None where that is not measured.
      tokens: of a call.
      flops_per_token: that are of use.
    """

    aim: str
    ours: Program
    theirs: Program
    compiled: Program | None
    tokens: int
    flops_per_token: float


def run(*, rounds: int) -> None:
    """Prints tokens a second of both, their ratio, and the share of this machine's matmul ceiling.

    Raises:
      ValueError: when torch or transformers is not installed.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                f"{package} is not installed; the comparison needs it: pip install 'zaya_jax[test]'"
            )
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"{count_parameters(MODEL):,} parameters, float32, batch {BATCH} x {LENGTH}, AdamW on all sides; "
        f"best of {rounds}, in turn, each side in a process of its own. {COMPARED}"
    )
    why_not = why_not_compiled()
    columns = ("ours,\ntokens/s", "trans-\nformers", "ratio", "aim", "com-\npiled", "ratio")
    columns = (*columns, "ours of\nceiling", "theirs of\nceiling")
    table = Table(
        name_column("what"), *map(number_column, columns), box=box.SIMPLE_HEAD, padding=0, caption=why_not
    )
    ceilings = []
    for name, row in _rows().items():
        row = dataclasses.replace(row, compiled=None) if why_not else row
        seconds = _time(name, row, rounds)
        ceilings.append(CEILING_FLOPS / seconds["ceiling"])
        table.add_row(name, *_cells(row, seconds))
    console.print(table)
    of_rows = ", ".join(f"{ceiling / 1e9:,.0f}" for ceiling in ceilings)
    console.print(f"ceiling: {of_rows} GFLOP/s, a float32 product of 2048 x 2048 in turn with each row")
    console.print(f"logits differ by {_difference():.1e} of the largest")


def _time(name: str, row: _Row, rounds: int) -> dict[str, float]:
    """Seconds of a call of each side, and of the ceiling."""
    sides = {"ours": row.ours, "transformers": row.theirs, "compiled": row.compiled}
    programs = {f"{name}, {side}": program for side, program in sides.items() if program}
    times = best_in_turn(programs | {"ceiling": ceiling_matmul}, rounds=rounds, limit=COMPILE_SECONDS)
    return {title.removeprefix(f"{name}, "): seconds for title, seconds in times.items()}


def _cells(row: _Row, seconds: dict[str, float]) -> tuple[str, ...]:
    """A line of the table, behind its name."""
    ours, theirs = seconds["ours"], seconds["transformers"]
    compiled = ("", "")
    if "compiled" in seconds:
        compiled = f"{row.tokens / seconds['compiled']:,.1f}", f"{seconds['compiled'] / ours:.2f}x"
    ceiling = seconds["ceiling"] / CEILING_FLOPS * row.tokens * row.flops_per_token
    rates = f"{row.tokens / ours:,.1f}", f"{row.tokens / theirs:,.1f}"
    shares = f"{ceiling / ours:.1%}", f"{ceiling / theirs:.1%}"
    return *rates, f"{theirs / ours:.2f}x", row.aim, *compiled, *shares


def why_not_compiled() -> str | None:
    """Why `torch.compile` is of no use here, in a sentence; None where it works."""
    try:
        best_in_turn({"torch.compile": compile_a_sum}, rounds=1, limit=COMPILE_SECONDS)
    except RuntimeError as error:
        said = re.split(r"\n|\\n", str(error))[0]  # an exception within one has its ends of lines escaped
        return f"nothing is compiled, because torch cannot do it here: {said}"
    return None


def compile_a_sum() -> Callable[[], Any]:
    """The least that `torch.compile` can be asked for: it finds a C++ compiler, or there is none."""
    import torch

    return functools.partial(torch.compile(lambda x: x + x), torch.ones(3))


def _rows() -> dict[str, _Row]:
    of_batch = math.fsum(forward_flops_per_token(MODEL, LENGTH).values())
    of_text = math.fsum(forward_flops_per_token(MODEL, PROMPT + NEW_TOKENS).values())
    return {
        "forward": _Row("1.3x", our_forward, their_forward, compiled_forward, BATCH * LENGTH, of_batch),
        f"decode, batch 1, {NEW_TOKENS} new": _Row("8x", our_decode, their_decode, None, NEW_TOKENS, of_text),
        "train step": _Row(
            "1.5x", our_training, their_training, compiled_training, BATCH * LENGTH, 3 * of_batch
        ),
    }


def our_forward() -> Callable[[], Any]:
    """A call of our compiled forward pass: the logits of the batch."""
    variables, tokens = _our_variables(), jnp.asarray(_tokens((BATCH, LENGTH)))
    apply = jax.jit(
        lambda variables, tokens: _ours(variables, tokens).logits_BTV, compiler_options=compiler_options()
    )
    return lambda: apply(variables, tokens)


def their_forward(*, compiled: bool = False) -> Callable[[], Any]:
    """A call of transformers' forward pass on the same batch, without gradients."""
    import torch

    model, tokens = _huggingface_model().eval(), torch.from_numpy(_tokens((BATCH, LENGTH)))
    if compiled:
        model.compile()

    @torch.no_grad()
    def forward():
        model(tokens)

    return forward


def our_decode() -> Callable[[], Any]:
    """Greedy continuation of a prompt, through the cache."""
    variables, prompt = _our_variables(), _tokens((1, PROMPT))[0].tolist()
    return lambda: generate(Zaya(MODEL, EXECUTION), variables, prompt, max_new_tokens=NEW_TOKENS)


def their_decode() -> Callable[[], Any]:
    """Greedy continuation of a prompt, through the cache."""
    import torch

    model, prompt = _huggingface_model().eval(), torch.from_numpy(_tokens((1, PROMPT)))
    return functools.partial(
        model.generate, prompt, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
    )


def our_training() -> Callable[[], Any]:
    """A step of AdamW, clipped; the process keeps its memory as that of `zaya train` does."""
    reuse_host_memory()
    config = Config(
        model=MODEL,
        data=DataConfig(sequence_length=LENGTH, batch_size=BATCH),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-5, warmup_steps=0),
        train=TrainConfig(num_steps=1000, update_norms=False),  # theirs tells none
        execution=dataclasses.replace(EXECUTION, scan_layers=False),
    )
    setup, mesh = make_setup(config), data_mesh(jax.devices()[:1])
    state = first_state(setup, _our_variables()["params"], jax.random.key(0))
    states = [jax.device_put(state, shardings(state, mesh))]  # or the second step is compiled anew
    batch = jax.device_put(make_example(_tokens((BATCH, LENGTH)), borders=NO_BORDERS))
    step = compiled_step(states[0], setup=setup, mesh=mesh)

    def train():
        states[0], metrics = step(states[0], batch)
        return metrics.loss

    return train


def their_training(*, compiled: bool = False) -> Callable[[], Any]:
    """A step of AdamW, clipped. Compiled, it is the model forward and backward that is."""
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
    """The same in each process."""
    import torch
    from transformers import ZayaConfig, ZayaForCausalLM

    torch.manual_seed(0)
    model = ZayaForCausalLM(ZayaConfig(**config_to_huggingface(MODEL)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("temp"):
                parameter.fill_(1.0)  # [HF] leaves zeros there for a checkpoint to fill: all keys would be 0
    model.generation_config.eos_token_id = None
    return model


def _our_variables() -> Any:
    """Its weights."""
    tensors = {name: tensor.numpy() for name, tensor in _huggingface_model().state_dict().items()}
    return jax.device_put(variables_from_huggingface(MODEL, tensors))


def _ours(variables: Any, tokens: jax.Array) -> Output:
    return cast(Output, Zaya(MODEL, EXECUTION).apply(variables, tokens))


def _tokens(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(1, MODEL.vocab_size, shape)


def _difference() -> float:
    """Largest difference of logits, relative to the largest."""
    import torch

    tokens = _tokens((2, 32))
    out = _ours(_our_variables(), jnp.asarray(tokens))
    with torch.no_grad():
        expected = _huggingface_model().eval()(torch.from_numpy(tokens)).logits.numpy()
    return float(np.abs(np.asarray(out.logits_BTV) - expected).max() / np.abs(expected).max())
