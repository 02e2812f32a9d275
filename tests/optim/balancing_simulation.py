"""A closed loop of routers and balancing rules: routers that send 90% of tokens to one of 16 experts.

The routers are the network's own, stacked as in its layers. They read Python's standard library: the input of
a token is the sum of random vectors for its byte and the two preceding ones, with other vectors in every
layer. The weights are fixed; only the balancing biases move. All rules see the same fresh tokens at every
step.

Letters: T time, D model width, L layers, E experts, X = E + 1 classes, J = 3 bytes of a token, P tokens, S
steps, R rules.
"""

import functools
import pathlib
import sysconfig
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from pallas_kernels.grouped_matmul import count_rows
from pallas_kernels.rms_norm import rms_norm
from zaya_jax.config import BalancingConfig, ModelConfig
from zaya_jax.model.router import route
from zaya_jax.model.weights import declare, initialize
from zaya_jax.model.zaya import initial_router_bias
from zaya_jax.optim.balancing import load_entropy, make_balancer

FAVOURED_SHARE = 0.9
"""Share of the tokens that expert 0 receives without balancing."""
EVEN = 0.99
"""Load entropy above which the load counts as even."""
SHARPNESS = 2.0
"""Factor on the initial output weights, as of a trained router whose first choice has a probability of about
0.5."""
MODEL = ModelConfig(
    hidden_size=64, num_hidden_layers=2, num_experts=16, router_hidden_size=32, initializer_range=0.2
)


class Routers(NamedTuple):
    """Routers that favour one expert.

    Attributes:
      weights: router weights of all layers, with a leading axis L.
      vectors: embeddings of bytes, shape [L, J, 256, D].
    """

    weights: Any
    vectors: jax.Array


def read_tokens(num_tokens: int) -> np.ndarray:
    """Returns tokens of Python's standard library in random order: each byte and the two before it, [P, J].

    Runs of white space become one space: otherwise an indentation would be many tokens with identical inputs,
    which no bias can send to different experts.
    """
    files = sorted(pathlib.Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    words = b" ".join(word for file in files for word in file.read_bytes().split())
    tokens_PJ = np.lib.stride_tricks.sliding_window_view(np.frombuffer(words, np.uint8), 3)
    return tokens_PJ[np.random.default_rng(0).integers(len(tokens_PJ), size=num_tokens)]


def make_routers(tokens_PJ: np.ndarray, *, seed: int) -> Routers:
    """Makes random routers whose logit of expert 0 leads by a constant, so that it wins 90% of the tokens."""
    key, vector_key = jax.random.split(jax.random.key(seed))
    declared: Any = declare(MODEL)
    weights = initialize(declared["layers"]["router"], key)
    # The output layer has no bias. A hidden channel of constant value replaces one.
    fc2 = weights["fc2"]
    fc2 = {"kernel": fc2["kernel"].at[:, :, 0].set(0.0), "bias": fc2["bias"].at[:, 0].set(1.0)}
    out_LRX = (SHARPNESS * weights["out_proj"]).at[:, 0].set(0.0)
    eda_LR = jnp.concatenate([jnp.zeros((1, MODEL.router_hidden_size)), weights["eda_scale"]])
    weights = weights | {"fc2": fc2, "out_proj": out_LRX, "eda_scale": eda_LR}
    shape = (MODEL.num_hidden_layers, 3, 256, MODEL.hidden_size)
    even = Routers(weights, jax.random.normal(vector_key, shape))
    probs_LBTX = _route(even, jnp.asarray(tokens_PJ), initial_router_bias(MODEL)).probs_BTX
    gap_LBT = jnp.log(probs_LBTX[..., 1:-1].max(axis=-1) / probs_LBTX[..., 0])
    lead_L = jnp.quantile(gap_LBT, FAVOURED_SHARE, axis=(1, 2)) / jax.nn.gelu(1.0, approximate=False)
    return Routers(weights | {"out_proj": out_LRX.at[:, 0, 0].set(lead_L)}, even.vectors)


def simulate(
    configs: Sequence[BalancingConfig], tokens_PJ: np.ndarray, *, num_steps: int, num_tokens: int
) -> np.ndarray:
    """Runs all balancing rules on the same routers and tokens.

    Args:
      configs: balancing rules and their rates.
      tokens_PJ: tokens that the steps read one after the other.
      num_steps: number of steps, S.
      num_tokens: number of tokens per step.

    Returns:
      Tokens per class, shape [R, S, L, X].
    """
    routers = make_routers(tokens_PJ[: 4 * num_tokens], seed=0)
    balancers = [make_balancer(config) for config in configs]
    bias_LX = initial_router_bias(MODEL)

    def count(bias_LX: jax.Array, tokens_PJ: jax.Array) -> jax.Array:
        experts_LBT = _route(routers, tokens_PJ, bias_LX).experts_BT
        return jax.vmap(lambda x_BT: count_rows(x_BT.ravel(), MODEL.num_router_classes))(experts_LBT)

    def step(carry: Any, tokens_PJ: jax.Array) -> tuple[Any, jax.Array]:
        biases_RLX = jnp.stack([bias_LX for bias_LX, _ in carry])
        # The networks do not depend on the biases: under vmap they run once for all rules.
        counts_RLX = jax.vmap(count, in_axes=(0, None))(biases_RLX, tokens_PJ)
        after = []
        for balancer, (bias_LX, state), counts_LX in zip(balancers, carry, counts_RLX, strict=True):
            updates, state = balancer.update(counts_LX, state, bias_LX)
            after.append((optax.apply_updates(bias_LX, updates), state))
        return after, counts_RLX

    initial = [(bias_LX, balancer.init(bias_LX)) for balancer in balancers]
    tokens_SPJ = np.resize(tokens_PJ, (num_steps, num_tokens, 3))
    counts_SRLX = jax.jit(functools.partial(lax.scan, step))(initial, jnp.asarray(tokens_SPJ))[1]
    return np.moveaxis(np.asarray(counts_SRLX), 1, 0)


def steps_until_even(counts_SLX: np.ndarray) -> int | None:
    """Returns the first step at which the load of every layer is even; None if there is none."""
    entropy_SL = jax.vmap(load_entropy)(jnp.asarray(counts_SLX))
    even_steps = np.flatnonzero(np.asarray(entropy_SL).min(axis=1) > EVEN)
    return int(even_steps[0]) if len(even_steps) else None


def _route(routers: Routers, tokens_PJ: jax.Array, bias_LX: jax.Array) -> Any:
    """Routes the tokens, as one row of text, in all layers; the results have a leading axis L."""
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
