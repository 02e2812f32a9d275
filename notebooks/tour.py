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
# # A tour of ZAYA1
#
# The network is a handful of pure functions. This notebook calls each on something small enough to
# look at, then trains a network of them for a few seconds.
#
# Letters end the names of arrays and say their axes: B batch, T time, D model width, N query heads,
# K key and value heads, H head width, E experts, X = E + 1 router classes, R router width, L layers,
# P rows.

# %%
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
from pallas_kernels.cca import rotate, taps_over_time
from pallas_kernels.cca.xla import qk_mean
from pallas_kernels.flash_attention import EVERYTHING
from pallas_kernels.flash_attention.reference import visible_keys
from pallas_kernels.grouped_matmul import count_rows, group_rows
from pallas_kernels.rms_norm import ResidualScaling, add_to_stream
from zaya_jax.config import BalancingConfig
from zaya_jax.data.batch import make_example
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.model.cca import CcaState, cca_projection, join_projections
from zaya_jax.model.experts import apply_experts, expert_weights
from zaya_jax.model.rope import rope_table
from zaya_jax.model.router import route
from zaya_jax.model.weights import count_parameters, declare, flatten_weights, initialise
from zaya_jax.optim.balancing import load_entropy, make_balancer
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.programs import compiled_step
from zaya_jax.train.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## Where 8.84 billion parameters sit
#
# `ModelConfig()` is ZAYA1-8B. `declare` lists every weight once: its axes, its initial value, and
# what moves it. Nothing is allocated.

# %%
config_8b = zaya_jax.ModelConfig()
declared = flatten_weights(declare(config_8b))
print(f"{'weight':<46}{'axes':<7}{'parameters':>14}")
for path, weight in declared.items():
    print(f"{path:<46}{weight.axes:<7}{weight.size:>14,}")
print(f"{'sum':<53}{count_parameters(config_8b):>14,}")
assert count_parameters(config_8b) == 8_840_488_784

# %%
sections: dict[str, int] = {}
for path, weight in declared.items():
    name = path.removeprefix("layers/").split("/")[0]
    sections[name] = sections.get(name, 0) + weight.size
names = sorted(sections, key=sections.__getitem__)

figure, axis = plt.subplots(figsize=(7, 3))
bars = axis.barh(names, [sections[name] for name in names])
axis.bar_label(bars, [f"{sections[name]:,}" for name in names], padding=4)
axis.set(xscale="log", xlabel="parameters (log scale)", xlim=(1e3, 1e12), title="ZAYA1-8B by part")
plt.show()

# %% [markdown]
# The experts hold 91 %. Each token uses one of 16, so the rest of the network decides how much of
# that is worth its memory.

# %% [markdown]
# ## Compressed convolutional attention
#
# Queries, keys and values live in a latent that is narrower than the stream. Two short convolutions
# over time mix it. We take a small block and two documents packed into one row of twelve tokens.

# %%
config = zaya_jax.ModelConfig(
    vocab_size=264,
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    moe_intermediate_size=32,
    num_experts=4,
    router_hidden_size=16,
    layer_pattern=("hybrid_sliding", "hybrid"),
    sliding_window=16,
    rope_theta=10_000.0,
    max_position_embeddings=256,
    initializer_range=0.1,
)
params = jax.jit(functools.partial(initialise, declare(config)))(jax.random.key(0))
attention = jax.tree.map(lambda weight_L: weight_L[0], params["layers"]["attention"])

time = 12
segments_BT = jnp.array([[1] * 7 + [2] * 5])
x_BTD = jax.random.normal(jax.random.key(1), (1, time, config.hidden_size))
latent_width = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
empty = CcaState(
    tail_BWC=jnp.zeros((1, config.conv_tail, latent_width)),
    delayed_BU=jnp.zeros((1, config.num_key_value_heads * config.head_dim // 2)),
)

# %% [markdown]
# ### Step 1: what a tap sees
#
# A convolution with two taps looks at a token and the one before it. At the first token of a
# document there is none before it: the tap sees `fill` in its place. Here each token carries its own
# number, and `fill` is -1. Twelve tokens come with one before them, also -1.

# %%
history_BSC = jnp.concatenate([jnp.array([-1.0]), jnp.arange(time, dtype=jnp.float32)])[None, :, None]
segments_BS = jnp.pad(segments_BT, ((0, 0), (1, 0)), mode="edge")
older_BTC, newer_BTC = taps_over_time(history_BSC, 2, segments_BS, fill=jnp.array(-1.0))
seen_2T = np.stack([older_BTC[0, :, 0], newer_BTC[0, :, 0]])

figure, axis = plt.subplots(figsize=(8, 1.8))
axis.imshow(seen_2T, cmap="viridis", aspect="auto")
for tap, time_index in np.ndindex(*seen_2T.shape):
    axis.text(time_index, tap, int(seen_2T[tap, time_index]), ha="center", va="center", color="white")
axis.axvline(6.5, color="red")
axis.set(yticks=[0, 1], yticklabels=["older tap", "newer tap"], xlabel="token", title="what each tap sees")
plt.show()
assert seen_2T[0, 7] == -1

# %% [markdown]
# ### Step 2: the mean of query and key
#
# A path leads around the convolutions. A query head takes the mean of itself and its key head. A key
# head takes the mean of what its query heads got. With queries 0, 2, 4, 6 and keys 10, 20 one can
# check it by hand.

# %%
q_BTNH = jnp.array([0.0, 2.0, 4.0, 6.0]).reshape(1, 1, 4, 1)
k_BTKH = jnp.array([10.0, 20.0]).reshape(1, 1, 2, 1)
mean_q_BTNH, mean_k_BTKH = qk_mean(q_BTNH, k_BTKH)
print("queries", mean_q_BTNH.ravel(), "keys", mean_k_BTKH.ravel())
np.testing.assert_allclose(mean_q_BTNH.ravel(), [5, 6, 12, 13])
np.testing.assert_allclose(mean_k_BTKH.ravel(), [5.5, 12.5])

# %% [markdown]
# ### Step 3: lengths and temperature
#
# Queries get length sqrt(H). Keys get sqrt(H) times a learned temperature, one a key head. A logit is
# then at most temperature x sqrt(H), whatever the weights do.

# %%
joined = join_projections(attention)  # the four matrices side by side: one product
warm = joined | {"temperature": jnp.array([0.5, 2.0])}
rotation = rope_table(jnp.arange(time)[None], theta=config.rope_theta, rotary_dim=config.rotary_dim)
q_BTNH, k_BTKH, v_BTKH, _ = cca_projection(x_BTD, warm, empty, rotation, segments_BT)
length_TN = jnp.linalg.norm(q_BTNH[0], axis=-1)
length_TK = jnp.linalg.norm(k_BTKH[0], axis=-1)

figure, axis = plt.subplots(figsize=(7, 2.6))
axis.plot(length_TN, "k--", label=["all queries"] + [None] * 3)
axis.plot(length_TK, "o-", label=["keys at temperature 0.5", "keys at temperature 2"])
axis.set(xlabel="token", ylabel="length", ylim=(0, 7), title=f"sqrt(H) = {config.head_dim**0.5:.2f}")
axis.legend(loc="upper right", ncols=3)
plt.show()
np.testing.assert_allclose(length_TN, config.head_dim**0.5, rtol=1e-5)
np.testing.assert_allclose(
    length_TK, config.head_dim**0.5 * jnp.array([[0.5, 2.0]]).repeat(time, 0), rtol=1e-5
)

# %% [markdown]
# ### Step 4: who reaches whom
#
# The size of the derivative of each query, key and value with respect to each input token. Two
# convolutions of two taps reach two tokens back. Values have no convolution: half of their channels
# come from the token before. Nothing crosses the border of the documents.


# %%
def projections(x_BTD):
    return cca_projection(x_BTD, joined, empty, rotation, segments_BT)[:3]


jacobians = jax.jit(jax.jacrev(projections))(x_BTD)
influence = [jnp.sqrt(jnp.sum(j_BTNHBTD[0, :, :, :, 0] ** 2, axis=(1, 2, 4))) for j_BTNHBTD in jacobians]

figure, axes = plt.subplots(1, 3, figsize=(9, 3.2), sharey=True)
for axis, name, reach_TS in zip(axes, ("queries", "keys", "values"), influence, strict=True):
    axis.imshow(reach_TS, cmap="magma")
    axis.axhline(6.5, color="red", lw=1)
    axis.axvline(6.5, color="red", lw=1)
    axis.set(title=name, xlabel="input token")
axes[0].set_ylabel("output token")
plt.show()
for reach_TS, back in zip(influence, (2, 2, 1), strict=True):
    distance_TS = np.arange(time)[:, None] - np.arange(time)[None]
    apart_TS = np.asarray(segments_BT[0][:, None] != segments_BT[0][None])
    assert np.all(reach_TS[(distance_TS < 0) | (distance_TS > back) | apart_TS] == 0)

# %% [markdown]
# ## Attention masks
#
# A key is visible if it is not later, within the window, and of the same document. A sliding layer
# and a full layer differ in one number, so both are the same function in the scan over layers.

# %%
packed_BT = jnp.array([[1] * 9 + [2] * 11 + [0] * 4])  # 0 is padding
masks = {
    "full": visible_keys(24, 24, (0, EVERYTHING), None, None),
    "window of 6": visible_keys(24, 24, (0, 6), None, None),
    "two documents": visible_keys(24, 24, (0, EVERYTHING), packed_BT, packed_BT),
    "both": visible_keys(24, 24, (0, 6), packed_BT, packed_BT),
}
figure, axes = plt.subplots(1, 4, figsize=(11, 3), sharey=True)
for axis, (name, mask_BTS) in zip(axes, masks.items(), strict=True):
    axis.imshow(mask_BTS[0], cmap="Greys", vmin=0, vmax=1.4)
    axis.set(title=name, xlabel="key")
axes[0].set_ylabel("query")
plt.show()

# %% [markdown]
# ## Rotary positions
#
# Half of a head's channels turn with the position, each pair at a speed of its own. The product of a
# query and a key then depends on their distance alone. A larger base turns more slowly and so tells
# apart tokens that lie further from each other.

# %%
head_dim, rotary_dim, offset = 128, 64, 1000
ones_BTNH = jnp.ones((1, 513, 1, head_dim))
positions_BT = jnp.arange(513)[None]

figure, axis = plt.subplots(figsize=(7, 3))
for theta in (10_000.0, 1_000_000.0, 5_000_000.0):
    keys = rotate(ones_BTNH, rope_table(positions_BT, theta=theta, rotary_dim=rotary_dim))
    moved = rotate(ones_BTNH, rope_table(positions_BT + offset, theta=theta, rotary_dim=rotary_dim))
    score_T = (keys[0, :, 0] @ keys[0, 0, 0]) / head_dim
    score_moved_T = (moved[0, :, 0] @ moved[0, 0, 0]) / head_dim
    np.testing.assert_allclose(score_T, score_moved_T, atol=2e-3)
    axis.plot(score_T, label=f"base {theta:,.0f}")
axis.set(xlabel="distance in tokens", ylabel="product of equal vectors", title="half of each head turns")
axis.legend()
plt.show()

# %% [markdown]
# ## Residual scaling
#
# The stream and the output of a layer each pass a learned affine before they are added. A plain sum
# grows with the square root of the depth. A scale below one on the stream bounds it.

# %%
depth, width = 80, 256
outputs_LBTD = jax.random.normal(jax.random.key(2), (depth, 1, 4, width))
zeros_D, ones_D = jnp.zeros(width), jnp.ones(width)

figure, axis = plt.subplots(figsize=(7, 3))
for scale in (1.0, 0.97, 0.8):
    scaling = ResidualScaling(zeros_D, ones_D, zeros_D, scale * ones_D)
    stream_BTD, rms = outputs_LBTD[0], []
    for output_BTD in outputs_LBTD:
        stream_BTD = add_to_stream(output_BTD, stream_BTD, scaling)
        rms.append(float(jnp.sqrt(jnp.mean(stream_BTD**2))))
    axis.plot(rms, label=f"residual scale {scale}")
axis.set(xlabel="sublayer", ylabel="root mean square", title="the stream, if every layer puts out noise")
axis.legend()
plt.show()

# %% [markdown]
# ## The router
#
# A router projects its input to a narrow state and adds the state of the router one layer up, scaled
# by a learned vector: exponential depth averaging. We set that vector to one number and ask how much
# the last router's state hears of each layer's input.

# %%
num_routers = 6
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
x_LD = jax.random.normal(jax.random.key(3), (num_routers, config.hidden_size))
figure, axis = plt.subplots(figsize=(7, 2.8))
for eda_scale in (0.0, 0.5, 0.9, 1.0):
    share_L = jnp.linalg.norm(jacobian(x_LD, eda_scale), axis=(0, 2))
    np.testing.assert_allclose(share_L[-2] / share_L[-1], eda_scale, atol=1e-5)
    axis.plot(share_L / share_L[-1], "o-", label=f"scale {eda_scale}")
axis.set(xlabel="layer of the input", ylabel="influence", title="what the last router's state hears")
axis.legend()
plt.show()

# %% [markdown]
# The state passes a norm and a small network, and a softmax gives the probabilities. A balancing bias
# takes part in the choice alone. The weight of the chosen expert stays its plain probability. The
# last class is the skip class; its bias starts at -1, so it is never chosen at first.

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
    routing = route(tokens_BTD, state_BTR, router, eda_R, bias_X, eps=1e-5)
    image = axis.imshow(routing.probs_BTX[0].T, cmap="Blues", aspect="auto")
    axis.plot(routing.experts_BT[0], "r.", label="chosen")
    axis.set(ylabel="class", yticks=range(config.num_router_classes), title=name)
    figure.colorbar(image, ax=axis)
    chosen_BT = jnp.take_along_axis(routing.probs_BTX, routing.experts_BT[:, :, None], axis=2)[:, :, 0]
    np.testing.assert_array_equal(routing.weights_BT, chosen_BT)
axes[1].set_xlabel("token")
plt.show()

# %% [markdown]
# ### The balancing controller, in a closed loop
#
# The gradient of an expert's bias is its share of the tokens less 1/E. AdamW applies it. There is no
# auxiliary loss. Here the router is a linear one with the identity as its kernel, so its input is
# its logits. Fresh tokens come at every step. At the start 90 % of them go to expert 0.

# %%
num_experts, num_tokens, num_steps = 8, 1024, 500
draws_PE = jax.random.normal(jax.random.key(5), (20_000, num_experts))
lead = -jnp.quantile(draws_PE[:, 0] - draws_PE[:, 1:].max(axis=1), 0.1)
identity_DX = jnp.pad(jnp.eye(num_experts), ((0, 0), (0, 1)))


def counts_of(key, bias_X):
    x_BTD = jax.random.normal(key, (1, num_tokens, num_experts)).at[:, :, 0].add(lead)
    no_state = jnp.zeros((1, num_tokens, 1))
    routing = route(x_BTD, no_state, {"kernel": identity_DX}, jnp.zeros(1), bias_X, eps=1e-5)
    return count_rows(routing.experts_BT[0], num_experts + 1)


@functools.partial(jax.jit, static_argnames="learning_rate")
def balance(learning_rate):
    balancer = make_balancer(BalancingConfig(learning_rate=learning_rate))

    def step(carry, key):
        bias_LX, state = carry
        counts_LX = counts_of(key, bias_LX[0])[None]
        updates, state = balancer.update(counts_LX, state, bias_LX)
        return (optax.apply_updates(bias_LX, updates), state), counts_LX[0]

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
# Too slow a controller takes long; too fast a one rings. The step size of AdamW does not depend on
# the size of the gradient, so the time to an even load is about (gap of probabilities) / (2 x rate).

# %% [markdown]
# ## Experts
#
# Rows are sorted by expert once, so that each expert multiplies one block of consecutive rows. No
# row is dropped, and no expert has a capacity. Rows that skip come last and get zeros.

# %%
num_rows, num_experts = 24, 4
experts_P = jax.random.randint(jax.random.key(7), (num_rows,), 0, num_experts + 1)
groups = group_rows(experts_P, num_experts)
sorted_experts_P = groups.sort(experts_P.astype(jnp.float32))

figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6), width_ratios=(1, 4, 1))
left.imshow(experts_P[:, None], cmap="tab10", vmax=9, aspect="auto")
left.set(title="rows", xticks=[], ylabel="row")
middle.imshow(
    jax.nn.one_hot(groups.order_P, num_rows) * (1 + sorted_experts_P[:, None]), cmap="Greys", aspect="auto"
)
middle.set(title="permutation", xlabel="row before", ylabel="row after")
right.imshow(sorted_experts_P[:, None], cmap="tab10", vmax=9, aspect="auto")
right.set(title="sorted", xticks=[])
plt.show()

# %%
weights = jax.tree.map(lambda weight_L: weight_L[0], params["layers"]["experts"])
x_PD = jax.random.normal(jax.random.key(8), (num_rows, config.hidden_size))
probs_P = jax.random.uniform(jax.random.key(9), (num_rows,))
out_PD = apply_experts(x_PD, experts_P, probs_P, expert_weights(weights, "float32"))
for row, expert in enumerate(np.asarray(experts_P)):
    expected_D = np.zeros(config.hidden_size)
    if expert < num_experts:
        gate_QF = jnp.einsum("d,dqf->qf", x_PD[row], weights["gate_up_proj"][expert])
        expected_D = (jax.nn.silu(gate_QF[0]) * gate_QF[1]) @ weights["down_proj"][expert]
    np.testing.assert_allclose(out_PD[row], probs_P[row] * expected_D, atol=1e-5)
print("rows of each class:", count_rows(experts_P, num_experts + 1), "- all as computed one by one")

# %% [markdown]
# ## Thirty steps of training
#
# `train_step` is one pure function of a state and a batch. We give it one short text, over and over,
# cut at different places. Muon moves the matrices, AdamW the rest, and the controller the biases.

# %%
run = zaya_jax.Config(
    model=config,
    data=zaya_jax.DataConfig(sequence_length=64, batch_size=8),
    optimizer=zaya_jax.OptimizerConfig(
        learning_rate=2e-2, final_learning_rate=2e-3, warmup_steps=3, weight_decay=0.0
    ),
    balancing=BalancingConfig(learning_rate=1e-2),
    train=zaya_jax.TrainConfig(num_steps=30),
    execution=zaya_jax.ExecutionConfig(dtype="float32"),
)
tokenizer = load_tokenizer("byte")
text = "a token goes to one expert. an expert takes its tokens in one block. "
stream = np.array(tokenizer.borders.lay_out(tokenizer.encode(text * 12)))
starts = np.random.default_rng(0).integers(
    0, len(stream) - run.data.sequence_length, (30, run.data.batch_size)
)

setup, mesh = make_setup(run), data_mesh(jax.devices()[:1])
# Where a step leaves its state: one that lay elsewhere would be compiled for on its own.
placed = shardings(abstract_state(run, setup, mesh), mesh)
state = jax.jit(functools.partial(init_state, run, setup), out_shardings=placed)()
step = compiled_step(state, setup=setup, mesh=mesh)  # of `zaya_jax.train_step`
history = []
for start_B in starts:
    window_BT = stream[start_B[:, None] + np.arange(run.data.sequence_length)]
    batch = make_example(window_BT, borders=tokenizer.borders)
    state, metrics = step(state, batch)
    history.append(jax.device_get(metrics))
print(f"loss {history[0].loss:.3f} -> {history[-1].loss:.3f} nats a byte")
assert history[-1].loss < history[0].loss / 2

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.plot([metrics.loss for metrics in history])
left.set(xlabel="step", ylabel="nats a byte", ylim=(0, None), title="loss")
right.plot([load_entropy(jnp.asarray(metrics.router_counts_LX)) for metrics in history])
right.set(xlabel="step", ylim=(0, 1.02), title="load entropy of each layer")
right.legend([f"layer {layer}" for layer in range(config.num_hidden_layers)])
plt.show()

# %% [markdown]
# ## Text
#
# `generate` reads the prompt once and then runs one compiled loop over the new tokens.

# %%
prompt = "an expert"
new_tokens = zaya_jax.generate(
    setup.model,
    state.variables,
    tokenizer.borders.begin(tokenizer.encode(prompt)),
    max_new_tokens=80,
    temperature=0.0,
)
print(prompt + tokenizer.decode(new_tokens))
