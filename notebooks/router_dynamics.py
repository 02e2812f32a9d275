# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # The router, and what keeps its experts busy
#
# One token goes to one expert. Which, a small network decides in each layer ([ZAYA1-8B], arXiv 2605.05365,
# section II-A-2, equations 1 to 5):
#
# ```text
# r_l    = down(x_l) + s_l * r_(l-1)          exponential depth averaging (EDA); s is learned
# p      = softmax(MLP(RMSNorm(r_l)))         E experts and a skip class
# expert = argmax(p + b)                      b: balancing biases, outside of autodiff
# out    = p[expert] * expert(x_l)            the bias takes no part in the weight
# b     <- b - AdamW(share of the tokens - 1/E)    after each step
# ```
#
# Letters: B batch, T time, D model width, R router width, X = E + 1 classes, L layers, S steps.

# %%
import dataclasses
import functools
import os

# What follows is small: most of its time is compilation, and the compiler need not try hard.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import zaya_jax
from pallas_kernels.grouped_matmul import count_rows
from zaya_jax.config import BalancingConfig
from zaya_jax.data.batch import make_example
from zaya_jax.data.borders import NO_BORDERS
from zaya_jax.model.router import route
from zaya_jax.model.weights import declare, initialise
from zaya_jax.optim.balancing import load_entropy, make_balancer
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.programs import compiled_step
from zaya_jax.train.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## What a router hears of the layers above it
#
# A router projects its input to a narrow state and adds the state of the router one layer up, scaled by a
# learned vector. We set that vector to one number and ask how much the last router's state hears of each
# layer's input: the share falls with the power of the distance.

# %%
config = zaya_jax.ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=4,
    router_hidden_size=16,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    initializer_range=0.1,
)
params = jax.jit(functools.partial(initialise, declare(config)))(jax.random.key(0))
router = jax.tree.map(lambda weight_L: weight_L[0], params["layers"]["router"])
router.pop("eda_scale")
no_bias_X = jnp.zeros(config.num_router_classes)


def last_state(x_LD, eda_scale):
    state_BTR = jnp.zeros((1, 1, config.router_hidden_size))
    for layer, x_D in enumerate(x_LD):
        eda_R = jnp.ones(config.router_hidden_size) * (eda_scale if layer else 0.0)
        state_BTR = route(x_D[None, None], state_BTR, router, eda_R, no_bias_X, eps=1e-5).state_BTR
    return state_BTR[0, 0]


jacobian = jax.jit(jax.jacrev(last_state))
x_LD = jax.random.normal(jax.random.key(3), (6, config.hidden_size))
figure, axis = plt.subplots(figsize=(7, 2.8))
for eda_scale in (0.0, 0.5, 0.9, 1.0):
    share_L = jnp.linalg.norm(jacobian(x_LD, eda_scale), axis=(0, 2))
    np.testing.assert_allclose(share_L[-2] / share_L[-1], eda_scale, atol=1e-5)
    axis.plot(share_L / share_L[-1], "o-", label=f"scale {eda_scale}")
axis.set(xlabel="layer of the input", ylabel="influence", title="what the last router's state hears")
axis.legend()
plt.show()

# %% [markdown]
# ## A bias chooses, and does not weigh
#
# The state passes a norm and a small network, and a softmax gives the probabilities. A balancing bias takes
# part in the choice alone: the weight of the chosen expert stays its plain probability, so that no gradient
# and no output depends on how even the load is. The last class is the skip class; its bias starts at -1, so
# it is never chosen at first.

# %%
tokens_BTD = 6 * jax.random.normal(jax.random.key(4), (1, 20, config.hidden_size))
state_BTR = jnp.zeros((1, 20, config.router_hidden_size))
eda_R = jnp.zeros(config.router_hidden_size)
biases = {
    "no preference": no_bias_X.at[-1].set(-1.0),
    "expert 1 favoured": no_bias_X.at[-1].set(-1.0).at[1].set(0.05),
}
figure, axes = plt.subplots(2, 1, figsize=(8, 4), sharex=True)
for axis, (name, bias_X) in zip(axes, biases.items(), strict=True):
    routing = jax.jit(functools.partial(route, eps=1e-5))(tokens_BTD, state_BTR, router, eda_R, bias_X)
    image = axis.imshow(routing.probs_BTX[0].T, cmap="Blues", aspect="auto")
    axis.plot(routing.experts_BT[0], "r.", label="chosen")
    axis.set(ylabel="class", yticks=range(config.num_router_classes), title=name)
    figure.colorbar(image, ax=axis)
    chosen_BT = jnp.take_along_axis(routing.probs_BTX, routing.experts_BT[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_array_equal(routing.weights_BT, chosen_BT)
axes[1].set_xlabel("token")
plt.show()

# %% [markdown]
# ## The controller by itself
#
# The gradient of an expert's bias is its share of the tokens less 1/E. AdamW applies it. There is no
# auxiliary loss. Here the router is a linear one with the identity as its kernel, so its input is its logits.
# Fresh tokens come at every step. At the start 90 % of them go to expert 0.

# %%
num_experts, num_tokens, num_steps = 8, 1024, 500
draws_PE = np.random.default_rng(5).standard_normal((20_000, num_experts))
lead = -np.quantile(draws_PE[:, 0] - draws_PE[:, 1:].max(axis=1), 0.1)
identity_DX = jnp.pad(jnp.eye(num_experts), ((0, 0), (0, 1)))


def counts_of(key, bias_X):
    x_BTD = jax.random.normal(key, (1, num_tokens, num_experts)).at[:, :, 0].add(lead)
    no_state = jnp.zeros((1, num_tokens, 1))
    routing = route(x_BTD, no_state, {"kernel": identity_DX}, jnp.zeros(1), bias_X, eps=1e-5)
    return count_rows(routing.experts_BT[0], num_experts + 1)


@jax.jit
def balance(learning_rate):
    balancer = make_balancer(BalancingConfig(learning_rate=1.0))

    def step(carry, key):
        bias_LX, state = carry
        counts_LX = counts_of(key, bias_LX[0])[None]
        updates, state = balancer.update(counts_LX, state, bias_LX)
        return (optax.apply_updates(bias_LX, learning_rate * updates), state), counts_LX[0]

    bias_LX = jnp.zeros((1, num_experts + 1)).at[:, -1].set(-1.0)
    keys = jax.random.split(jax.random.key(6), num_steps)
    return jax.lax.scan(step, (bias_LX, balancer.init(bias_LX)), keys)[1]


figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4))
for learning_rate in (3e-4, 1e-3, 3e-3, 1e-1):
    counts_SX = balance(learning_rate)
    left.plot(load_entropy(counts_SX), label=f"learning rate {learning_rate:g}")
left.set(xlabel="step", ylabel="load entropy", ylim=(0, 1.02), title="1 is an even load")
left.legend()
counts_SX = balance(3e-3)
right.plot(counts_SX[:, :-1] / num_tokens)
right.axhline(1 / num_experts, color="k", ls="--")
right.set(xlabel="step", ylabel="share of the tokens", title="experts at learning rate 0.003")
plt.show()
assert 0.87 < counts_SX[0, 0] / num_tokens < 0.93
assert load_entropy(counts_SX)[-50:].min() > 0.98

# %% [markdown]
# Too slow a controller takes long; too fast a one rings. The step size of AdamW does not depend on the size
# of the gradient, so the time to an even load is about (gap of probabilities) / (2 x rate). `zaya bench
# balancing` compares it with the rules of DeepSeek-V3 and of the textbook.
#
# ## In a network that learns
#
# Words of a made-up language: each token has four successors, and tokens come with very different frequencies
# (Zipf), as in text. Two runs from the same weights on the same batches; in one the biases are put back after
# each step. A run's own switch is `balancing.learning_rate`, which 0 turns off; here one compiled step does
# both.

# %%
NUM_STEPS, TIME, BATCH = 80, 32, 32
numbers = np.random.default_rng(7)
zipf_V = 1 / np.arange(1, config.vocab_size + 1)
successors_VS = numbers.choice(config.vocab_size, (config.vocab_size, 4), p=zipf_V / zipf_V.sum())


def make_batch():
    tokens_BT = np.empty((BATCH, TIME + 1), np.int64)
    tokens_BT[:, 0] = numbers.choice(config.vocab_size, BATCH, p=zipf_V / zipf_V.sum())
    for time in range(TIME):
        tokens_BT[:, time + 1] = successors_VS[tokens_BT[:, time], numbers.integers(0, 4, BATCH)]
    return make_example(tokens_BT[:, :-1], borders=NO_BORDERS, targets_BT=tokens_BT[:, 1:])


run = zaya_jax.Config(
    model=config,
    data=zaya_jax.DataConfig(sequence_length=TIME, batch_size=BATCH),
    optimizer=zaya_jax.OptimizerConfig(learning_rate=1e-2, warmup_steps=5, weight_decay=0.0),
    balancing=BalancingConfig(learning_rate=1e-2),
    train=zaya_jax.TrainConfig(num_steps=NUM_STEPS),
    execution=zaya_jax.ExecutionConfig(dtype="float32"),
)
setup, mesh = make_setup(run), data_mesh(jax.devices()[:1])
placed = shardings(abstract_state(run, setup, mesh), mesh)
make_state = jax.jit(functools.partial(init_state, run, setup), out_shardings=placed)
step = compiled_step(make_state(), setup=setup, mesh=mesh)


def train(batches, *, balanced):
    """What the steps of a run told: loads, entropies and losses."""
    state, told = make_state(), []
    for batch in batches:
        before_LX = np.asarray(state.router_bias_LX)
        state, metrics = step(state, batch)
        if not balanced:
            bias_LX = jax.device_put(before_LX, placed.router_bias_LX)
            state = dataclasses.replace(state, router_bias_LX=bias_LX)
        told.append(metrics)
    told = jax.device_get(told)
    return {
        "loss_S": np.array([each.loss for each in told]),
        "counts_SLX": np.stack([each.router_counts_LX for each in told]),
        "entropy_SL": np.stack([each.router_entropy_L for each in told]),
    }


batches = [make_batch() for _ in range(NUM_STEPS)]
runs = {"balanced": train(batches, balanced=True), "left alone": train(batches, balanced=False)}

# %%
figure, axes = plt.subplots(2, config.num_hidden_layers, figsize=(11, 4.6), sharex=True, sharey=True)
for row, (name, told) in zip(axes, runs.items(), strict=True):
    shares_SLX = told["counts_SLX"] / (TIME * BATCH)
    for layer, axis in enumerate(row):
        axis.stackplot(np.arange(NUM_STEPS), shares_SLX[:, layer].T, colors=plt.cm.tab10.colors)
        axis.set(title=f"{name}, layer {layer}", ylim=(0, 1), xlim=(0, NUM_STEPS - 1))
    row[0].set_ylabel("share of the tokens")
for axis in axes[1]:
    axis.set_xlabel("step")
plt.show()

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3))
for (name, told), style in zip(runs.items(), ("-", ":"), strict=True):
    left.plot(told["loss_S"], style, color="k", label=name)
    for layer in range(config.num_hidden_layers):
        load_S = load_entropy(told["counts_SLX"][:, layer])
        middle.plot(load_S, style, color=f"C{layer}", label=f"layer {layer}, {name}")
        right.plot(told["entropy_SL"][:, layer], style, color=f"C{layer}")
left.axhline(np.log(4), color="r", lw=0.8, label="ln 4: a guess among successors")
left.set(xlabel="step", title="loss, nats a token")
left.legend(fontsize=7)
middle.set(xlabel="step", ylim=(0, 1.02), title="load entropy: 1 is even")
middle.legend(fontsize=6)
right.set(xlabel="step", title="a token's own entropy, nats")
plt.show()

# %%
print(f"{'last 20 steps':<16}{'layer':>6}{'largest load':>14}{'smallest':>10}{'load entropy':>14}")
ends = {}
for name, told in runs.items():
    counts_LX = told["counts_SLX"][-20:].sum(axis=0)
    entropy_L = np.asarray(load_entropy(counts_LX))
    ends[name] = entropy_L
    for layer, counts_X in enumerate(counts_LX):
        loads_E = counts_X[:-1] / counts_X[:-1].mean()
        print(f"{name:<16}{layer:>6}{loads_E.max():>14.2f}{loads_E.min():>10.2f}{entropy_L[layer]:>14.3f}")
assert ends["balanced"].min() > 0.9
assert ends["left alone"].min() < ends["balanced"].min()

# %% [markdown]
# A load of 1 is an even share. Two entropies are told apart here. That of the *load* says whether experts are
# used alike, and is what the controller moves. That of a *token's probabilities* says how sure a router is,
# and is nobody's aim: it falls as experts become different. Balanced experts that are also sure are what one
# wants; even loads of a router that cannot tell tokens apart would look the same in the first picture alone.
