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
# # Compressed convolutional attention, step by step
#
# Attention is expensive in two ways: the projections of every step, and the keys and values that decoding
# stores. CCA ([CCA], arXiv 2510.04476, section II-B and Listing 1) computes attention in a latent space that
# is narrower than the residual stream, and compensates for the narrowness with two short convolutions over
# time.
#
# ```text
# q, k      = narrow projections of x                           compression
# q', k'    = conv2(conv1(q, k)) + mean of q and k              convolution over time, qk-mean
# q', k'    = sqrt(H) q' / |q'|,  temperature sqrt(H) k' / |k'| lengths
# v         = half from this token, half from the one before    value shift
# out       = softmax(q' k' / sqrt(H)) v                        standard attention, after RoPE
# ```
#
# Array names end with letters for their axes: B batch, T time, S time of keys, D model width, N query heads,
# K key and value heads, A = N + K heads, H head width, C = A x H latent channels.

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

import zaya_jax
from pallas_kernels.cca import taps_over_time
from pallas_kernels.cca.xla import qk_mean
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.model.attention.cca import CcaState, cca_projection, join_projections
from zaya_jax.model.rope import rope_table
from zaya_jax.model.weights import declare, initialize
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## Compression: projections and cache
#
# ZAYA1-8B's stream has width 2,048, which would be 16 heads of 128. It has 8 query heads and 2 key/value
# heads. Decoding stores one key and one value per key head and token. MLA stores 512 latent channels and a
# shared key of 64 channels ([DeepSeek-V3] section 2.1.1; its sizes there are for a stream of 7,168). CCA also
# stores, once per sequence rather than per token, the inputs that its convolutions need.

# %%
config_8b = zaya_jax.ModelConfig()
width, head = config_8b.hidden_size, config_8b.head_dim
num_layers = config_8b.num_hidden_layers
kept = {
    "MHA, 16 heads": 2 * width,
    "GQA, 4 key heads": 2 * 4 * head,
    "MLA, 512 + 64": 512 + 64,
    "CCA, 2 key heads": 2 * config_8b.num_key_value_heads * head,
}
cache = jax.eval_shape(lambda: zaya_jax.init_cache(config_8b, 1, 1024))
bytes_of_pool = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.pool))
state_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache.state))
assert bytes_of_pool == 1024 * num_layers * 2 * kept["CCA, 2 key heads"]  # bfloat16

print(f"{'attention':<18}{'channels/token':>18}{'KiB/token':>13}{'GiB at 131,072':>16}{'of MHA':>9}")
for name, channels in kept.items():
    per_token = channels * 2 * num_layers
    print(
        f"{name:<18}{channels:>18,}{per_token / 2**10:>13.0f}{per_token * 2**17 / 2**30:>16.2f}"
        f"{channels / kept['MHA, 16 heads']:>9.1%}"
    )
print(f"CCA's convolution inputs, once per sequence, float32: {state_bytes / 2**10:,.0f} KiB")

# %% [markdown]
# That is an eighth of MHA's cache. Compression alone costs quality; the next steps recover it.
#
# ## The inputs of a convolution tap
#
# A convolution with two taps reads a token and the previous one. The first token of a document has no
# previous token, and the tap reads `fill` instead. Here each token carries its own number, and `fill` is -1.
# Two documents are packed into a row of twelve tokens, and the padding before the row is -1 as well.

# %%
time = 12
segments_BT = jnp.array([[1] * 7 + [2] * 5])
history_BSC = jnp.concatenate([jnp.array([-1.0]), jnp.arange(time, dtype=jnp.float32)])[None, :, None]
segments_BS = jnp.pad(segments_BT, ((0, 0), (1, 0)), mode="edge")
older_BTC, newer_BTC = taps_over_time(history_BSC, 2, segments_BS, fill=jnp.array(-1.0))
seen_2T = np.stack([older_BTC[0, :, 0], newer_BTC[0, :, 0]])

figure, axis = plt.subplots(figsize=(8, 1.8))
axis.imshow(seen_2T, cmap="viridis", aspect="auto")
for tap, time_index in np.ndindex(*seen_2T.shape):
    axis.text(time_index, tap, int(seen_2T[tap, time_index]), ha="center", va="center", color="white")
axis.axvline(6.5, color="red")
axis.set(
    yticks=[0, 1], yticklabels=["older tap", "newer tap"], xlabel="token", title="token that each tap reads"
)
plt.show()
assert seen_2T[0, 7] == -1

# %% [markdown]
# The first convolution is depthwise: each channel has its own two weights. The second mixes the channels of a
# head with two H x H matrices per head. Neither mixes heads.
#
# ## The mean of query and key
#
# A skip path bypasses the convolutions. A query head adds the mean of itself and its key head. A key head
# adds the mean of its query heads' contributions. With queries 0, 2, 4, 6 and keys 10, 20 this is easy to
# check by hand.

# %%
q_BTNH = jnp.array([0.0, 2.0, 4.0, 6.0]).reshape(1, 1, 4, 1)
k_BTKH = jnp.array([10.0, 20.0]).reshape(1, 1, 2, 1)
mean_q_BTNH, mean_k_BTKH = qk_mean(q_BTNH, k_BTKH)
print("queries", mean_q_BTNH.ravel(), "keys", mean_k_BTKH.ravel())
np.testing.assert_allclose(mean_q_BTNH.ravel(), [5, 6, 12, 13])
np.testing.assert_allclose(mean_k_BTKH.ravel(), [5.5, 12.5])

# %% [markdown]
# A query and a key of the same token are therefore similar from the first step on, and attention initially
# prefers similar tokens.
#
# ## Lengths and temperature
#
# Queries are normalized to length sqrt(H), and keys to sqrt(H) times a learned temperature per key head; the
# temperature is linear, as in [ZAYA1-8B] appendix C. A logit is therefore at most temperature x sqrt(H),
# whatever the weights are.

# %%
config = zaya_jax.ModelConfig(
    vocab_size=48,
    hidden_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=2,
    router_hidden_size=8,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    initializer_range=0.1,
)
params = jax.jit(functools.partial(initialize, declare(config)))(jax.random.key(0))
attention = jax.tree.map(lambda weight_L: weight_L[0], params["layers"]["attention"])
x_BTD = jax.random.normal(jax.random.key(1), (1, time, config.hidden_size))
latent_width = (config.num_attention_heads + config.num_key_value_heads) * config.head_dim
empty = CcaState(
    tail_BWC=jnp.zeros((1, config.conv_tail, latent_width)),
    delayed_BU=jnp.zeros((1, config.num_key_value_heads * config.head_dim // 2)),
)
joined = join_projections(attention)  # the four matrices side by side: one product
rotation = rope_table(jnp.arange(time)[None], theta=config.rope_theta, rotary_dim=config.rotary_dim)


@jax.jit
def projections(x_BTD, temperature_K):
    weights = joined | {"temperature": temperature_K}
    return cca_projection(x_BTD, weights, empty, rotation, segments_BT)[:3]


q_BTNH, k_BTKH, _ = projections(x_BTD, jnp.array([0.5, 2.0]))
length_TN = jnp.linalg.norm(q_BTNH[0], axis=-1)
length_TK = jnp.linalg.norm(k_BTKH[0], axis=-1)

figure, axis = plt.subplots(figsize=(7, 2.6))
axis.plot(length_TN, "k--", label=["all queries"] + [None] * 3)
axis.plot(length_TK, "o-", label=["keys at temperature 0.5", "keys at temperature 2"])
axis.set(xlabel="token", ylabel="length", ylim=(0, 11), title=f"sqrt(H) = {config.head_dim**0.5:.2f}")
axis.legend(loc="upper right", ncols=3)
plt.show()
root = config.head_dim**0.5
np.testing.assert_allclose(length_TN, root, rtol=1e-5)
np.testing.assert_allclose(length_TK, root * jnp.array([[0.5, 2.0]]).repeat(time, 0), rtol=1e-5)

# %% [markdown]
# ## Receptive fields
#
# These are the norms of the derivatives of each query, key and value with respect to each input token. Two
# convolutions of two taps reach two tokens back. Values have no convolution: half of their channels come from
# the previous token, which is the value shift. Nothing crosses the boundary between the documents.

# %%
jacobians = jax.jit(jax.jacrev(projections))(x_BTD, jnp.ones(2))
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
# ## Benefit: induction in one layer
#
# A few random tokens are repeated with a different period in each sequence. To predict the next token, the
# network must find the same token in the previous copy and return *its successor*; the distance varies, so a
# fixed position does not help. Plain attention needs two layers: the first writes each token's predecessor
# into its state, the second finds it. In CCA the convolution puts the predecessor into the key, so one layer
# suffices. `your_own.py` trains plain attention on the same task.

# %%
TIME, PERIODS = 32, (8, 16)
run = zaya_jax.Config(
    model=config,
    data=zaya_jax.DataConfig(sequence_length=TIME, batch_size=32),
    optimizer=zaya_jax.OptimizerConfig(learning_rate=1e-2, warmup_steps=5, weight_decay=0.0),
    train=zaya_jax.TrainConfig(num_steps=220),
    execution=zaya_jax.ExecutionConfig(dtype="float32"),
)


def make_batch(random):
    """Repeated tokens; only targets that can be predicted count, from the second copy on."""
    rows, weights = [], []
    for _ in range(run.data.batch_size):
        period = random.integers(PERIODS[0], PERIODS[1] + 1)
        rows.append(np.resize(random.permutation(config.vocab_size)[:period], TIME + 1))
        weights.append(np.arange(TIME) >= period)
    tokens_BT = np.stack(rows)
    batch = make_example(tokens_BT[:, :-1], delimiters=NO_DELIMITERS, targets_BT=tokens_BT[:, 1:])
    return dataclasses.replace(batch, weights_BT=np.float32(weights))


setup, mesh = make_setup(run), data_mesh(jax.devices()[:1])
# The sharding of a step's output state: an input with another sharding would trigger a second compilation.
placed = shardings(abstract_state(run, setup, mesh), mesh)
state, losses = jax.jit(functools.partial(init_state, run, setup), out_shardings=placed)(), []
step = compiled_step(state, setup=setup, mesh=mesh)  # of `zaya_jax.train_step`
random = np.random.default_rng(0)
for _ in range(run.train.num_steps):
    state, metrics = step(state, make_batch(random))
    losses.append(metrics.loss)
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}; a uniform guess has {np.log(config.vocab_size):.2f}")

# %% [markdown]
# Next, parts of the trained network are ablated one at a time: the previous-token taps of both convolutions,
# the second half of the values (that of the previous token), and most of the temperature. The maps are from
# `zaya_jax.attention_maps`: the weight of each earlier token, averaged over heads.

# %%
batch = make_batch(np.random.default_rng(1))
counts_BT = batch.weights_BT > 0
period = int(TIME - counts_BT[0].sum())
tokens_BT = jnp.asarray(batch.tokens_BT)
predict = jax.jit(lambda variables: setup.model.apply(variables, tokens_BT).logits_BTV.argmax(-1))


def without_convolutions(weights):
    depthwise, grouped = weights["conv_depthwise"], weights["conv_grouped"]
    return {
        "conv_depthwise": depthwise | {"kernel": depthwise["kernel"].at[:, 0].set(0.0)},  # [L, tap, C]
        "conv_grouped": grouped | {"kernel": grouped["kernel"].at[:, :, 0].set(0.0)},  # [L, A, tap, H, H]
    }


changes = {
    "whole": lambda weights: {},
    "no older taps": without_convolutions,
    "no value shift": lambda weights: {"v_proj_delayed": 0 * weights["v_proj_delayed"]},
    "temperature / 8": lambda weights: {"temperature": weights["temperature"] / 8},
}
maps, shares = {}, {}
for name, change in changes.items():
    params = state.variables["params"]
    attention = params["layers"]["attention"]
    changed = attention | change(attention)
    variables = state.variables | {"params": params | {"layers": params["layers"] | {"attention": changed}}}
    maps[name] = zaya_jax.attention_maps(setup.model, variables, tokens_BT[:1])[0, 0]
    right_BT = np.asarray(predict(variables)) == batch.targets_BT
    shares[name] = right_BT[counts_BT].mean()

figure, axes = plt.subplots(1, len(maps), figsize=(12, 3.4), sharey=True)
for axis, (name, map_NTS) in zip(axes, maps.items(), strict=True):
    axis.imshow(map_NTS.mean(axis=0), cmap="magma", vmin=0, vmax=0.8)
    # The successor of the previous copy is on a diagonal: one token less than a period back.
    axis.plot(np.arange(1, TIME - period + 1), np.arange(period, TIME), "c:", lw=1)
    axis.set(title=f"{name}: {shares[name]:.0%} right", xlabel="key")
axes[0].set_ylabel("query")
plt.show()

# %%
print(f"{'network':<18}{'right':>7}{'on what came next, by head':>34}{'entropy, nats':>16}")
for name, map_NTS in maps.items():
    rows_NTS = np.asarray(map_NTS)[:, period:]
    distance_TS = np.arange(period, TIME)[:, None] - np.arange(TIME)
    behind_TS = (distance_TS + 1) % period == 0  # in this copy or an earlier one
    here_N = np.sum(rows_NTS * behind_TS, axis=-1).mean(axis=-1)
    entropy = -np.sum(rows_NTS * np.log(np.maximum(rows_NTS, 1e-30)), axis=-1).mean()
    heads = "  ".join(f"{share:.2f}" for share in here_N)
    print(f"{name:<18}{shares[name]:>7.0%}{heads:>34}{entropy:>16.2f}")
assert shares["whole"] > 0.9
assert shares["no older taps"] < 0.5
assert shares["temperature / 8"] < shares["whole"]

# %% [markdown]
# The network attends to the dotted diagonal: the token after the earlier copy. Without the previous-token
# taps a key describes only its own token, and the diagonal disappears. At a low temperature the logits are
# too small to single out one token, whatever the weights are: a bound on logits limits how sharp attention
# can be.
