"""`zaya bench torch`: this model against Hugging Face's, same weights, same machine, same minute.

Inference and training run one after the other in processes of their own, each as `zaya generate` and
`zaya train` set theirs up; in each, both sides take turns.
"""

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.bench.measure import best_seconds, matmul_ceiling
from zaya_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.convert.huggingface import config_to_huggingface, variables_from_huggingface
from zaya_jax.data.batch import make_example
from zaya_jax.inference.generate import generate
from zaya_jax.model.flops import forward_flops_per_token
from zaya_jax.model.weights import count_parameters
from zaya_jax.model.zaya import Output, Zaya
from zaya_jax.parallel.compiler import compiler_options
from zaya_jax.parallel.host_memory import reuse_host_memory
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.state import first_state, make_rules
from zaya_jax.train.step import compiled_step

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
    dtype="float32",
    remat="products",
)
BATCH, LENGTH = 8, 256
PROMPT, NEW_TOKENS = 16, 64
SETTLING_SECONDS = 0.2
"""The threads of either library wait for more work for a while, and keep a core from the other."""


@dataclasses.dataclass(frozen=True)
class _Row:
    """One comparison: names, tokens a call, useful operations a token, the aim."""

    name: str
    tokens: int
    flops_per_token: float
    aim: str
    ours: Callable[[], Any]
    theirs: Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A row's tokens a second, and their useful operations as shares of the ceiling."""

    name: str
    aim: str
    ours: float
    theirs: float
    our_share: float
    their_share: float


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
        f"{count_parameters(MODEL):,} parameters, float32, batch {BATCH} x {LENGTH}, AdamW on both sides; "
        f"best of {rounds}, in turn"
    )
    table = Table(
        "what", "ours, tokens/s", "transformers", "ratio", "aim", "ours of ceiling", "theirs of ceiling"
    )
    ceilings, differences = [], []
    for part in PARTS:
        rows, ceiling, difference = _in_its_process(part, rounds)
        ceilings.append(ceiling)
        differences.append(difference)
        for row in rows:
            table.add_row(
                row.name,
                f"{row.ours:,.1f}",
                f"{row.theirs:,.1f}",
                f"{row.ours / row.theirs:.2f}x",
                row.aim,
                f"{row.our_share:.1%}",
                f"{row.their_share:.1%}",
            )
    console.print(table)
    of_parts = " and ".join(f"{ceiling / 1e9:,.0f}" for ceiling in ceilings)
    console.print(
        f"ceiling: {of_parts} GFLOP/s, a float32 product of 2048 x 2048 beside {' and '.join(PARTS)}"
    )
    console.print(f"logits differ by {max(differences):.1e} of the largest")


def _in_its_process(part: str, rounds: int) -> tuple[list[_Measured], float, float]:
    command = [sys.executable, "-m", __name__, part, str(rounds)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    rows, ceiling, difference = json.loads(done.stdout.splitlines()[-1])
    return [_Measured(**row) for row in rows], ceiling, difference


def measure(part: str, rounds: int) -> tuple[list[_Measured], float, float]:
    """A part's rows, the ceiling in FLOP/s, and the largest difference of logits relative to the largest."""
    if part == "training":
        reuse_host_memory()  # of both sides: they share the process
    theirs = _huggingface_model()
    tensors = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    variables = jax.device_put(variables_from_huggingface(MODEL, tensors))
    rows = [make_row(theirs, variables) for make_row in PARTS[part]]
    ceiling = matmul_ceiling(rounds=rounds)
    measured = [_measure_row(row, ceiling, rounds) for row in rows]
    return measured, ceiling, _difference(theirs, variables)


def _measure_row(row: _Row, ceiling: float, rounds: int) -> _Measured:
    calls = {"ours": row.ours, "theirs": row.theirs}
    times = best_seconds(calls, rounds=rounds, settling=SETTLING_SECONDS)
    ours, theirs = (row.tokens / times[side] for side in ("ours", "theirs"))
    our_share, their_share = (rate * row.flops_per_token / ceiling for rate in (ours, theirs))
    return _Measured(row.name, row.aim, ours, theirs, our_share, their_share)


def _huggingface_model() -> Any:
    import torch
    from transformers import ZayaConfig, ZayaForCausalLM

    torch.manual_seed(0)
    model = ZayaForCausalLM(ZayaConfig(**config_to_huggingface(MODEL)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("temp"):
                parameter.fill_(1.0)  # zeros are a placeholder, which would zero all keys (facts 2.2)
    model.generation_config.eos_token_id = None
    return model


def _ours(variables: Any, tokens: jax.Array) -> Output:
    return cast(Output, Zaya(MODEL).apply(variables, tokens))


def _tokens(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(0).integers(1, MODEL.vocab_size, shape)


def _forward(theirs: Any, variables: Any) -> _Row:
    import torch

    tokens = _tokens((BATCH, LENGTH))
    apply = jax.jit(
        lambda variables, tokens: _ours(variables, tokens).logits_BTV, compiler_options=compiler_options()
    )
    ours_in, theirs_in = jnp.asarray(tokens), torch.from_numpy(tokens)

    @torch.no_grad()
    def theirs_forward():
        return np.asarray(theirs.eval()(theirs_in).logits[0, 0, 0])

    flops = math.fsum(forward_flops_per_token(MODEL, LENGTH).values())
    return _Row("forward", tokens.size, flops, "1.3x", lambda: apply(variables, ours_in), theirs_forward)


def _decode(theirs: Any, variables: Any) -> _Row:
    import torch

    prompt = _tokens((1, PROMPT))
    model = Zaya(MODEL)

    def ours_decode():
        return generate(model, variables, prompt[0].tolist(), max_new_tokens=NEW_TOKENS)

    @torch.no_grad()
    def theirs_decode():
        theirs.eval().generate(
            torch.from_numpy(prompt), max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS, do_sample=False
        )

    flops = math.fsum(forward_flops_per_token(MODEL, PROMPT + NEW_TOKENS).values())
    return _Row(f"decode, batch 1, {NEW_TOKENS} new", NEW_TOKENS, flops, "8x", ours_decode, theirs_decode)


def _train(theirs: Any, variables: Any) -> _Row:
    import torch

    tokens = _tokens((BATCH, LENGTH))
    theirs_in = torch.from_numpy(tokens)
    adamw = torch.optim.AdamW(theirs.parameters(), lr=1e-5)
    config = Config(
        model=MODEL,
        data=DataConfig(sequence_length=LENGTH, batch_size=BATCH),
        optimizer=OptimizerConfig(name="adamw", learning_rate=1e-5, warmup_steps=0),
        train=TrainConfig(num_steps=1000),
    )
    rules, mesh = make_rules(config), data_mesh(jax.devices()[:1])
    params = jax.tree.map(jnp.copy, variables["params"])
    states = [first_state(rules, params, jax.random.key(0))]
    batch = jax.device_put(make_example(tokens, bos_id=-1, pad_id=-1))
    step = compiled_step(states[0], rules=rules, mesh=mesh)

    def ours_step():
        states[0], metrics = step(states[0], batch)
        return metrics.loss

    def theirs_step():
        theirs.train()
        adamw.zero_grad()
        theirs(theirs_in, labels=theirs_in).loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        adamw.step()

    flops = 3 * math.fsum(forward_flops_per_token(MODEL, LENGTH).values())
    return _Row("train step", tokens.size, flops, "1.5x", ours_step, theirs_step)


def _difference(theirs: Any, variables: Any) -> float:
    """Largest difference of logits, relative to the largest, with the weights that theirs has by now."""
    import torch

    tokens = _tokens((2, 32))
    tensors = {name: tensor.detach().numpy() for name, tensor in theirs.state_dict().items()}
    out = _ours(jax.device_put(variables_from_huggingface(MODEL, tensors)), jnp.asarray(tokens))
    with torch.no_grad():
        expected = theirs.eval()(torch.from_numpy(tokens)).logits.numpy()
    return float(np.abs(np.asarray(out.logits_BTV) - expected).max() / np.abs(expected).max())


PARTS = {"inference": (_forward, _decode), "training": (_train,)}

if __name__ == "__main__":
    rows, *figures = measure(sys.argv[1], int(sys.argv[2]))
    print(json.dumps([[dataclasses.asdict(row) for row in rows], *figures]))
