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
# # The router and the balancing of experts
#
# Each token uses one expert, selected by a small network in each layer ([ZAYA1-8B], arXiv 2605.05365, section
# II-A-2, equations 1 to 5):
#
# ```text
# r_l    = down(x_l) + s_l * r_(l-1)          exponential depth averaging (EDA); s is learned
# p      = softmax(MLP(RMSNorm(r_l)))         E experts and a skip class
# expert = argmax(p + b)                      b: balancing biases, outside of autodiff
# out    = p[expert] * expert(x_l)            the bias does not affect the weight
# b     <- b - AdamW(share of the tokens - 1/E)    after each step
# ```
#
# Letters: B batch, T time, D model width, R router width, X = E + 1 classes, L layers, S steps.

# %%
import dataclasses
import functools
import os

# The examples are small and spend most of their time on compilation: the compiler need not optimize.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax

import zaya_jax
from pallas_kernels.grouped_matmul import count_rows
from zaya_jax.config import BalancingConfig
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.model.router import route
from zaya_jax.model.weights import declare, initialize
from zaya_jax.optim.balancing import load_entropy, make_balancer
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## The influence of earlier layers on a router
#
# A router projects its input to a narrow state and adds the state of the previous layer's router, scaled by a
# learned vector. We set that vector to a constant and measure the influence of each layer's input on the last
# router's state: it decays exponentially with the distance.

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
params = jax.jit(functools.partial(initialize, declare(config)))(jax.random.key(0))
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
axis.set(xlabel="layer of the input", ylabel="influence", title="influence on the last router's state")
axis.legend()
plt.show()

# %% [markdown]
# ## A bias affects the choice, not the weight
#
# The state passes a norm, a small network and a softmax, which returns the probabilities. A balancing bias
# only affects the choice: the weight of the chosen expert is its probability without the bias, so neither
# gradients nor outputs depend on how even the load is. The last class is the skip class; its bias starts at
# -1, so it is not chosen at first.

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
# ## Three balancing rules
#
# The gradient of an expert's bias is its share of the tokens minus 1/E. ZAYA1 applies it with AdamW, and uses
# no auxiliary loss. `balancing.rule` offers two more: "sign" moves each bias by a fixed amount (DeepSeek-V3,
# arXiv 2412.19437, section 2.1.2), and "pid" is the textbook PID controller.
#
# Here the router is linear with an identity kernel, so its input is its logits. Every step draws fresh
# tokens. At the start 90% of them go to expert 0. The load entropy is 1 when all experts receive equally many
# tokens.

# %%
num_experts, num_tokens, num_steps = 8, 1024, 500
draws_PE = np.random.default_rng(5).standard_normal((20_000, num_experts))
lead = -np.quantile(draws_PE[:, 0] - draws_PE[:, 1:].max(axis=1), 0.1)
identity_DX = jnp.pad(jnp.eye(num_experts), ((0, 0), (0, 1)))
RATES = {"adamw": (1e-3, 3e-3, 1e-2), "sign": (1e-3, 3e-3, 1e-2), "pid": (1e-2, 3e-2, 1e-1)}
EVEN = 0.98


def counts_of(key, bias_X):
    x_BTD = jax.random.normal(key, (1, num_tokens, num_experts)).at[:, :, 0].add(lead)
    no_state = jnp.zeros((1, num_tokens, 1))
    routing = route(x_BTD, no_state, {"kernel": identity_DX}, jnp.zeros(1), bias_X, eps=1e-5)
    return count_rows(routing.experts_BT[0], num_experts + 1)


@functools.partial(jax.jit, static_argnames="rule")
def balance(learning_rate, *, rule="adamw"):
    balancer = make_balancer(BalancingConfig(rule=rule, learning_rate=1.0))

    def step(carry, key):
        bias_LX, state = carry
        counts_LX = counts_of(key, bias_LX[0])[None]
        updates, state = balancer.update(counts_LX, state, bias_LX)
        return (optax.apply_updates(bias_LX, learning_rate * updates), state), counts_LX[0]

    bias_LX = jnp.zeros((1, num_experts + 1)).at[:, -1].set(-1.0)
    keys = jax.random.split(jax.random.key(6), num_steps)
    return jax.lax.scan(step, (bias_LX, balancer.init(bias_LX)), keys)[1]


figure, axes = plt.subplots(2, 3, figsize=(12, 5.4), sharex=True, sharey="row")
print(f"{'rule':<8}{'learning rate':>14}{'steps until even':>18}{'lowest of the last 100':>24}")
for (rule, rates), (upper, lower) in zip(RATES.items(), axes.T, strict=True):
    for rate in rates:
        counts_SX = balance(rate, rule=rule)
        entropy_S = np.asarray(load_entropy(counts_SX))
        even_steps = np.flatnonzero(entropy_S > EVEN)
        first = str(even_steps[0]) if len(even_steps) else "never"
        print(f"{rule:<8}{rate:>14g}{first:>18}{entropy_S[-100:].min():>24.3f}")
        upper.plot(entropy_S, label=f"learning rate {rate:g}")
        if rate == rates[1]:
            lower.plot(counts_SX[:, :-1] / num_tokens, lw=0.8)
            assert 0.87 < counts_SX[0, 0] / num_tokens < 0.93
            assert len(even_steps)
            assert entropy_S[-100:].mean() > EVEN
    upper.set(title=rule, ylim=(0, 1.02))
    upper.legend(loc="lower right")
    lower.axhline(1 / num_experts, color="k", ls="--")
    lower.set(xlabel="step", title=f"experts at learning rate {rates[1]:g}")
axes[0, 0].set_ylabel("load entropy")
axes[1, 0].set_ylabel("share of the tokens")
plt.show()

# %% [markdown]
# A slow controller needs many steps; a fast one oscillates. The step size of AdamW does not depend on the
# size of the gradient, so the time to an even load is about (gap of probabilities) / (2 x rate).
# `tests/optim/test_balancing.py` runs the three rules on the network's own routers and real text.
#
# ## In a training run
#
# The data are a made-up language: each token has four successors, and token frequencies follow Zipf's law, as
# in text. Two runs start from the same weights and read the same batches; in one the biases are reset after
# each step. A real run turns balancing off with `balancing.learning_rate` 0; here one compiled step serves
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
    return make_example(tokens_BT[:, :-1], delimiters=NO_DELIMITERS, targets_BT=tokens_BT[:, 1:])


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
    """Loads, entropies and losses of the steps of a run."""
    state, history = make_state(), []
    for batch in batches:
        before_LX = np.asarray(state.router_bias_LX)
        state, metrics = step(state, batch)
        if not balanced:
            bias_LX = jax.device_put(before_LX, placed.router_bias_LX)
            state = dataclasses.replace(state, router_bias_LX=bias_LX)
        history.append(metrics)
    history = jax.device_get(history)
    return {
        "loss_S": np.array([each.loss for each in history]),
        "counts_SLX": np.stack([each.router_counts_LX for each in history]),
        "entropy_SL": np.stack([each.router_entropy_L for each in history]),
    }


batches = [make_batch() for _ in range(NUM_STEPS)]
runs = {"balanced": train(batches, balanced=True), "left alone": train(batches, balanced=False)}

# %%
figure, axes = plt.subplots(2, config.num_hidden_layers, figsize=(11, 4.6), sharex=True, sharey=True)
for row, (name, history) in zip(axes, runs.items(), strict=True):
    shares_SLX = history["counts_SLX"] / (TIME * BATCH)
    for layer, axis in enumerate(row):
        axis.stackplot(np.arange(NUM_STEPS), shares_SLX[:, layer].T, colors=plt.cm.tab10.colors)
        axis.set(title=f"{name}, layer {layer}", ylim=(0, 1), xlim=(0, NUM_STEPS - 1))
    row[0].set_ylabel("share of the tokens")
for axis in axes[1]:
    axis.set_xlabel("step")
plt.show()

# %%
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3))
for (name, history), style in zip(runs.items(), ("-", ":"), strict=True):
    left.plot(history["loss_S"], style, color="k", label=name)
    for layer in range(config.num_hidden_layers):
        load_S = load_entropy(history["counts_SLX"][:, layer])
        middle.plot(load_S, style, color=f"C{layer}", label=f"layer {layer}, {name}")
        right.plot(history["entropy_SL"][:, layer], style, color=f"C{layer}")
left.axhline(np.log(4), color="r", lw=0.8, label="ln 4: a guess among successors")
left.set(xlabel="step", title="loss, nats per token")
left.legend(fontsize=7)
middle.set(xlabel="step", ylim=(0, 1.02), title="load entropy: 1 is even")
middle.legend(fontsize=6)
right.set(xlabel="step", title="entropy of a token's probabilities, nats")
plt.show()

# %%
print(f"{'last 20 steps':<16}{'layer':>6}{'largest load':>14}{'smallest':>10}{'load entropy':>14}")
ends = {}
for name, history in runs.items():
    counts_LX = history["counts_SLX"][-20:].sum(axis=0)
    entropy_L = np.asarray(load_entropy(counts_LX))
    ends[name] = entropy_L
    for layer, counts_X in enumerate(counts_LX):
        loads_E = counts_X[:-1] / counts_X[:-1].mean()
        print(f"{name:<16}{layer:>6}{loads_E.max():>14.2f}{loads_E.min():>10.2f}{entropy_L[layer]:>14.3f}")
assert ends["balanced"].min() > 0.9
assert ends["left alone"].min() < ends["balanced"].min()

# %% [markdown]
# A load of 1 is an even share. There are two different entropies. That of the *load* measures whether experts
# are used equally, and the controller raises it. That of a *token's probabilities* measures how certain a
# router is; nothing controls it, and it falls as experts become different. The goal is balanced experts with
# certain routers; even loads of a router that cannot distinguish tokens would look the same in the first
# picture.
