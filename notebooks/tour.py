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
# The network is a handful of pure functions. This notebook calls each of them on small inputs, and then
# trains a small network for a few seconds.
#
# Array names end with letters for their axes: B batch, T time, D model width, N query heads, K key and value
# heads, H head width, E experts, L layers, P rows.

# %%
import functools
import os

# The examples are small and spend most of their time on compilation: the compiler need not optimize.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import zaya_jax
from pallas_kernels.cca import rotate
from pallas_kernels.flash_attention import NO_WINDOW
from pallas_kernels.flash_attention.reference import visible_keys
from pallas_kernels.grouped_matmul import count_rows, group_rows
from pallas_kernels.rms_norm import ResidualScaling, add_to_stream
from zaya_jax.config import BalancingConfig
from zaya_jax.data.reading.batch import make_example
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.model.experts import apply_experts, expert_weights
from zaya_jax.model.rope import rope_table
from zaya_jax.model.weights import count_parameters, declare, flatten_weights, initialize
from zaya_jax.optim.balancing import load_entropy
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## Where the 8.84 billion parameters are
#
# `ModelConfig()` is ZAYA1-8B. `declare` lists every weight once: its axes, its initial value, and its
# optimizer. Nothing is allocated.

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
# The experts contain 91% of the parameters. Each token uses one of 16 experts, so routing determines how
# useful that memory is.

# %% [markdown]
# ## A small network
#
# The rest of this notebook uses this network or smaller ones. `cca.py` explains its attention step by step,
# `router_dynamics.py` its routers and their balancing, and `muon_adamw.py` its optimizers.

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
params = jax.jit(functools.partial(initialize, declare(config)))(jax.random.key(0))

# %% [markdown]
# ## Attention masks
#
# A key is visible if it is not later than the query, within the window, and of the same document. A sliding
# layer and a full layer differ only in one number, so the scan over layers uses the same function for both.

# %%
packed_BT = jnp.array([[1] * 9 + [2] * 11 + [0] * 4])  # 0 is padding
masks = {
    "full": visible_keys(24, 24, (0, NO_WINDOW), None, None),
    "window of 6": visible_keys(24, 24, (0, 6), None, None),
    "two documents": visible_keys(24, 24, (0, NO_WINDOW), packed_BT, packed_BT),
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
# Half of a head's channels rotate with the position, each pair at its own frequency. The product of a query
# and a key then depends only on their distance. A larger base rotates more slowly and thus distinguishes
# tokens that are further apart.

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
axis.set(xlabel="distance in tokens", ylabel="product of equal vectors", title="half of each head rotates")
axis.legend()
plt.show()

# %% [markdown]
# ## Residual scaling
#
# The residual stream and the output of a layer each pass a learned affine map before they are added. A plain
# sum would grow with the square root of the depth. A scale below one on the stream bounds it.

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
axis.set(xlabel="sublayer", ylabel="root mean square", title="residual stream when every layer outputs noise")
axis.legend()
plt.show()

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
print("rows per class:", count_rows(experts_P, num_experts + 1), "- all equal to separate products")

# %% [markdown]
# ## Thirty steps of training
#
# `train_step` is one pure function of a state and a batch. We train on one short text, cut at different
# places. Muon updates the matrices, AdamW the other weights, and the controller the biases.

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
stream = np.array(tokenizer.delimiters.wrap(tokenizer.encode(text * 12)))
starts = np.random.default_rng(0).integers(
    0, len(stream) - run.data.sequence_length, (30, run.data.batch_size)
)

setup, mesh = make_setup(run), data_mesh(jax.devices()[:1])
# The sharding of a step's output state: an input with another sharding would trigger a second compilation.
placed = shardings(abstract_state(run, setup, mesh), mesh)
state = jax.jit(functools.partial(init_state, run, setup), out_shardings=placed)()
step = compiled_step(state, setup=setup, mesh=mesh)  # of `zaya_jax.train_step`
history = []
for start_B in starts:
    window_BT = stream[start_B[:, None] + np.arange(run.data.sequence_length)]
    batch = make_example(window_BT, delimiters=tokenizer.delimiters)
    state, metrics = step(state, batch)
    history.append(jax.device_get(metrics))
print(f"loss {history[0].loss:.3f} -> {history[-1].loss:.3f} nats per byte")
assert history[-1].loss < history[0].loss / 2

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3))
left.plot([metrics.loss for metrics in history])
left.set(xlabel="step", ylabel="nats per byte", ylim=(0, None), title="loss")
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
    tokenizer.delimiters.begin(tokenizer.encode(prompt)),
    max_new_tokens=80,
    temperature=0.0,
)
print(prompt + tokenizer.decode(new_tokens))
