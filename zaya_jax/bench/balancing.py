"""`zaya bench balancing`: how soon each rule evens out a router that sends 90 % of tokens to one expert.

The routers are the network's own, one above the other as in its layers, with ZAYA1-8B's 16 experts.
They read Python's standard library: the input of a token is the sum of random vectors of its byte and
of the two before, other vectors in every layer. The weights stay as they are; only the biases move. All
controllers see the same fresh tokens at every step.

Letters: B batch, T time, D model width, L layers, E experts, X = E + 1 classes, J = 3 bytes that a
token is made of, P tokens, S steps, R rules with their rates.
"""

import dataclasses
import functools
import itertools
import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from rich.console import Console
from rich.table import Table

from pallas_kernels.grouped_matmul import count_rows
from pallas_kernels.rms_norm import rms_norm
from zaya_jax.config import BalancingConfig, ModelConfig
from zaya_jax.model.router import route
from zaya_jax.model.weights import declare, initialise
from zaya_jax.model.zaya import initial_router_bias
from zaya_jax.optim.balancing import load_entropy, make_balancer
from zaya_jax.tables import name_column, number_column

FAVOURED = 0.9
"""Share of the tokens that the first expert gets to begin with."""
EVEN = 0.99
"""Load entropy that counts as even."""
SHARPNESS = 2.0
"""Times the initial output weights: a router that has learned, whose first choice has about half."""
NUM_STEPS, NUM_TOKENS = 800, 4096
PICTURE = "balancing.png"
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "sign": (1e-3, 3e-3, 1e-2), "pid": (1e-2, 3e-2, 1e-1)}
MODEL = ModelConfig(
    hidden_size=64, num_hidden_layers=2, num_experts=16, router_hidden_size=32, initializer_range=0.2
)


@dataclasses.dataclass(frozen=True)
class Routers:
    """Routers that favour one expert, and what makes bytes their inputs."""

    weights: Any
    """Of all layers, L leading."""
    vectors: jax.Array
    """Of bytes, [L, J, 256, D]."""


def run(*, rounds: int) -> None:
    """Prints the steps until the load is even, and draws the curves into `balancing.png`.

    Args:
      rounds: how many random routers, of which the slowest counts.

    Raises:
      ValueError: when matplotlib is not installed.
    """
    pyplot = _pyplot()
    pairs = [(rule, rate) for rule, rates in RATES.items() for rate in rates]
    configs = [BalancingConfig(rule=cast(Any, rule), learning_rate=rate) for rule, rate in pairs]
    tokens_PJ = read_tokens(NUM_STEPS * NUM_TOKENS)
    counts = [simulate(configs, tokens_PJ, num_steps=NUM_STEPS, seed=seed) for seed in range(rounds)]
    found = [[judge(counts_RSLX[i]) for counts_RSLX in counts] for i in range(len(configs))]
    console = Console(soft_wrap=True, highlight=False)
    console.print(_table(configs, found))
    _draw(pyplot, configs, counts[0], found)
    console.print(f"picture: {PICTURE}")


def read_tokens(num_tokens: int) -> np.ndarray:
    """Tokens of Python's own library in random order, each the byte and the two before it, [P, J].

    Runs of white space are one space: an indentation would be many tokens of the very same input, which
    no bias can send to different experts.
    """
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = b" ".join(word for file in files for word in file.read_bytes().split())
    tokens_PJ = np.lib.stride_tricks.sliding_window_view(np.frombuffer(words, np.uint8), 3)
    return tokens_PJ[np.random.default_rng(0).integers(len(tokens_PJ), size=num_tokens)]


def make_routers(tokens_PJ: np.ndarray, *, seed: int) -> Routers:
    """Random routers that send 90 % of a text's tokens to expert 0, by a constant lead of its logit.

    The output layer has no bias; a hidden channel that is made constant stands in for one.
    """
    key, vector_key = jax.random.split(jax.random.key(seed))
    declared: Any = declare(MODEL)
    weights = initialise(declared["layers"]["router"], key)
    fc2 = weights["fc2"]
    fc2 = {"kernel": fc2["kernel"].at[:, :, 0].set(0.0), "bias": fc2["bias"].at[:, 0].set(1.0)}
    out_LRX = (SHARPNESS * weights["out_proj"]).at[:, 0].set(0.0)
    eda_LR = jnp.concatenate([jnp.zeros((1, MODEL.router_hidden_size)), weights["eda_scale"]])
    weights = weights | {"fc2": fc2, "out_proj": out_LRX, "eda_scale": eda_LR}
    shape = (MODEL.num_hidden_layers, 3, 256, MODEL.hidden_size)
    even = Routers(weights, jax.random.normal(vector_key, shape))
    probs_LBTX = _route(even, jnp.asarray(tokens_PJ), initial_router_bias(MODEL)).probs_BTX
    behind_LBT = jnp.log(probs_LBTX[..., 1:-1].max(axis=-1) / probs_LBTX[..., 0])
    lead_L = jnp.quantile(behind_LBT, FAVOURED, axis=(1, 2)) / jax.nn.gelu(1.0, approximate=False)
    return Routers(weights | {"out_proj": out_LRX.at[:, 0, 0].set(lead_L)}, even.vectors)


def simulate(
    configs: Sequence[BalancingConfig],
    tokens_PJ: np.ndarray,
    *,
    num_steps: int,
    num_tokens: int = NUM_TOKENS,
    seed: int = 0,
) -> np.ndarray:
    """Runs all controllers on the same routers and tokens.

    Args:
      configs: of the controllers.
      tokens_PJ: what the steps read, one part after the other.
      num_steps: of each.
      num_tokens: that a step reads.
      seed: of the routers.

    Returns:
      Tokens of each class, [R, S, L, X].
    """
    routers = make_routers(tokens_PJ[: 4 * num_tokens], seed=seed)
    balancers = [make_balancer(config) for config in configs]
    bias_LX = initial_router_bias(MODEL)

    def count(bias_LX: jax.Array, tokens_PJ: jax.Array) -> jax.Array:
        experts_LBT = _route(routers, tokens_PJ, bias_LX).experts_BT
        return jax.vmap(lambda x_BT: count_rows(x_BT.ravel(), MODEL.num_router_classes))(experts_LBT)

    def step(carry: Any, tokens_PJ: jax.Array) -> tuple[Any, jax.Array]:
        biases_RLX = jnp.stack([bias_LX for bias_LX, _ in carry])
        # The networks, which do not see the biases, run once for all.
        counts_RLX = jax.vmap(count, in_axes=(0, None))(biases_RLX, tokens_PJ)
        after = []
        for balancer, (bias_LX, state), counts_LX in zip(balancers, carry, counts_RLX, strict=True):
            updates, state = balancer.update(counts_LX, state, bias_LX)
            after.append((optax.apply_updates(bias_LX, updates), state))
        return after, counts_RLX

    begin = [(bias_LX, balancer.init(bias_LX)) for balancer in balancers]
    tokens_SPJ = np.resize(tokens_PJ, (num_steps, num_tokens, 3))
    counts_SRLX = jax.jit(functools.partial(lax.scan, step))(begin, jnp.asarray(tokens_SPJ))[1]
    return np.moveaxis(np.asarray(counts_SRLX), 1, 0)


@dataclasses.dataclass(frozen=True)
class Evenness:
    """What a controller reached, in the layer that is furthest from even.

    Attributes:
      steps: before the load was even for the first time; None if it never was.
      lowest: load entropy in the last hundred steps.
    """

    steps: int | None
    lowest: float


def judge(counts_SLX: np.ndarray) -> Evenness:
    """How soon the load was even, and how even it stays."""
    entropy_S = lowest_entropy(counts_SLX)
    even = np.flatnonzero(entropy_S > EVEN)
    return Evenness(int(even[0]) if len(even) else None, float(entropy_S[-100:].min()))


def _route(routers: Routers, tokens_PJ: jax.Array, bias_LX: jax.Array) -> Any:
    """The answers of all layers' routers, L leading; a text is one row."""
    ones_D = jnp.ones(MODEL.hidden_size)

    def layer(state_BTR: jax.Array, inputs: Any) -> tuple[jax.Array, Any]:
        weights, vectors, bias_X = inputs
        x_PD = vectors[0, tokens_PJ[:, 0]] + vectors[1, tokens_PJ[:, 1]] + vectors[2, tokens_PJ[:, 2]]
        x_BTD = rms_norm(x_PD[None], ones_D, eps=MODEL.rms_norm_eps)
        eda_R = weights["eda_scale"]
        routing = route(x_BTD, state_BTR, weights, eda_R, bias_X, eps=MODEL.rms_norm_eps)
        return routing.state_BTR, routing

    state_BTR = jnp.zeros((1, tokens_PJ.shape[0], MODEL.router_hidden_size))
    return lax.scan(layer, state_BTR, (routers.weights, routers.vectors, bias_LX))[1]


def lowest_entropy(counts_SLX: np.ndarray) -> np.ndarray:
    """Load entropy of the layer that is furthest from even, [S]."""
    return np.asarray(jax.vmap(load_entropy)(jnp.asarray(counts_SLX))).min(axis=1)


def _table(configs: Sequence[BalancingConfig], found: Sequence[Sequence[Evenness]]) -> Table:
    title = (
        f"load entropy of the least even of {MODEL.num_hidden_layers} layers; at first {FAVOURED:.0%} of "
        f"tokens are at one of {MODEL.num_experts} experts, {NUM_TOKENS:,} tokens a step"
    )
    table = Table(
        name_column("rule"),
        number_column("learning rate"),
        number_column(f"steps until\nabove {EVEN}"),
        name_column("each router"),
        number_column("lowest in\nthe last 100"),
        title=title,
    )
    for config, each in zip(configs, found, strict=True):
        steps = ", ".join(_say(one.steps) for one in each)
        lowest = min(one.lowest for one in each)
        table.add_row(config.rule, f"{config.learning_rate:g}", _say(_slowest(each)), steps, f"{lowest:.4f}")
    return table


def _slowest(found: Sequence[Evenness]) -> int | None:
    steps = [each.steps for each in found if each.steps is not None]
    return max(steps) if len(steps) == len(found) else None


def _say(steps: int | None) -> str:
    return f"not in {NUM_STEPS:,}" if steps is None else f"{steps}"


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError(
            "matplotlib is not installed; the picture needs it: pip install 'zaya_jax[notebooks]'"
        ) from error
    matplotlib.use("agg")  # a file, also where there is no screen
    from matplotlib import pyplot

    return pyplot


def _draw(
    pyplot: Any,
    configs: Sequence[BalancingConfig],
    counts_RSLX: np.ndarray,
    found: Sequence[Sequence[Evenness]],
) -> None:
    """Above, the entropy for each rate; below, the shares of all experts for the soonest rate."""
    figure, axes = pyplot.subplots(2, len(RATES), figsize=(13, 7), sharex=True, sharey="row")
    runs = zip(configs, counts_RSLX, found, strict=True)
    for column, (rule, group) in enumerate(itertools.groupby(runs, key=lambda each: each[0].rule)):
        upper, lower = axes[:, column]
        soonest = (NUM_STEPS + 1, counts_RSLX[0], 0.0)
        for config, counts_SLX, each in group:
            slowest = _slowest(each)
            label = f"rate {config.learning_rate:g}: {_say(slowest)}"
            upper.plot(lowest_entropy(counts_SLX), lw=1.2, label=label)
            this = (NUM_STEPS if slowest is None else slowest, counts_SLX, config.learning_rate)
            soonest = min(soonest, this, key=lambda candidate: candidate[0])
        upper.axhline(EVEN, color="0.4", lw=0.8, ls="--")
        upper.set(title=rule, ylim=(0, 1.03))
        upper.legend(title=f"steps until above {EVEN}", loc="lower right", frameon=False)
        _, counts_SLX, rate = soonest
        lower.plot(counts_SLX[:, 0, :-1] / NUM_TOKENS, lw=0.8)
        lower.axhline(1 / MODEL.num_experts, color="0.4", lw=0.8, ls="--")
        lower.set(xlabel="optimiser step", yscale="log", ylim=(1e-3, 1), title=f"rate {rate:g}")
    axes[0, 0].set_ylabel("load entropy, least even layer")
    axes[1, 0].set_ylabel("share of each expert, layer 1")
    figure.suptitle(f"From {FAVOURED:.0%} of tokens at one of {MODEL.num_experts} experts to an even load")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=150)
    pyplot.close(figure)
