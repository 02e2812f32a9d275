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
# # A custom attention in forty lines
#
# An attention is an entry in `VARIANTS` of `zaya_jax.model.attention.block`: the weights that it declares,
# and a function from a chunk of the residual stream to queries, keys and values. The block provides the rest:
# causal attention within windows and documents, the cache, the output projection, initialization, the choice
# of optimizer, ZeRO-1, and rematerialization.
#
# We add plain multi-head attention, with as many heads as CCA has, and train both on the task of `cca.py`: a
# few tokens are repeated with a different period in each sequence.
#
# Letters: B batch, T time, D model width, N query heads, K key and value heads, H head width, L layers.

# %%
import dataclasses
import functools
import os

# The examples are small and spend most of their time on compilation: the compiler need not optimize.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import matplotlib.pyplot as plt
import numpy as np

import zaya_jax
from pallas_kernels.cca import rotate
from pallas_kernels.product import product
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.model.attention.block import VARIANTS, AttentionVariant
from zaya_jax.model.weights import count_parameters
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## The forty lines
#
# A weight is declared by its axes, beginning with the axis L of layers, and by which axes are the inputs and
# outputs of a matrix. Muon and the initialization need nothing else.


# %%
def declare_mha(declare):
    """Three matrices per layer; the output projection belongs to the block."""
    return {
        "q_proj": declare.normal("LDNH", ("D", "NH")),
        "k_proj": declare.normal("LDKH", ("D", "KH")),
        "v_proj": declare.normal("LDKH", ("D", "KH")),
    }


def project(x_BTD, kernel_DNH):
    """All heads in one product."""
    batch, time, width = x_BTD.shape
    kernel_DC = kernel_DNH.astype(x_BTD.dtype).reshape(width, -1)
    return product(x_BTD.reshape(-1, width), kernel_DC).reshape(batch, time, *kernel_DNH.shape[1:])


def mha(x_BTD, weights, state, rotation, segments_BT, *, implementation):
    """Queries, keys and values of a chunk, and the state after it; no token depends on another one here."""
    del segments_BT, implementation
    q_BTNH = rotate(project(x_BTD, weights["q_proj"]), rotation).astype(x_BTD.dtype)
    k_BTKH = rotate(project(x_BTD, weights["k_proj"]), rotation).astype(x_BTD.dtype)
    return q_BTNH, k_BTKH, project(x_BTD, weights["v_proj"]), state


VARIANTS["mha"] = AttentionVariant(
    declare=declare_mha,
    prepare=lambda weights: weights,
    queries_keys_values=mha,
    empty_state=lambda config, batch_size: (),  # decoding needs nothing but keys and values
)

# %% [markdown]
# On the command line, put `VARIANTS[...] = ...` into your config file, or into a module that it imports;
# `--config.model.attention=mha` then selects it.
#
# ## Training
#
# Both have the same sizes, batches and number of steps. CCA additionally has its convolutions.

# %%
cca_config = zaya_jax.ModelConfig(
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
mha_config = dataclasses.replace(cca_config, attention="mha")
TIME, PERIODS, NUM_STEPS = 32, (8, 16), 220


def make_batch(random):
    """Repeated tokens; only targets that can be predicted count, from the second copy on."""
    rows, weights = [], []
    for _ in range(32):
        period = random.integers(PERIODS[0], PERIODS[1] + 1)
        rows.append(np.resize(random.permutation(cca_config.vocab_size)[:period], TIME + 1))
        weights.append(np.arange(TIME) >= period)
    tokens_BT = np.stack(rows)
    batch = make_example(tokens_BT[:, :-1], delimiters=NO_DELIMITERS, targets_BT=tokens_BT[:, 1:])
    return dataclasses.replace(batch, weights_BT=np.float32(weights))


def train(config):
    """The losses of a run, and the trained network."""
    run = zaya_jax.Config(
        model=config,
        data=zaya_jax.DataConfig(sequence_length=TIME, batch_size=32),
        optimizer=zaya_jax.OptimizerConfig(learning_rate=1e-2, warmup_steps=5, weight_decay=0.0),
        train=zaya_jax.TrainConfig(num_steps=NUM_STEPS),
        execution=zaya_jax.ExecutionConfig(dtype="float32"),
    )
    setup, mesh = make_setup(run), data_mesh(jax.devices()[:1])
    placed = shardings(abstract_state(run, setup, mesh), mesh)
    state, losses = jax.jit(functools.partial(init_state, run, setup), out_shardings=placed)(), []
    step, random = compiled_step(state, setup=setup, mesh=mesh), np.random.default_rng(0)
    for _ in range(NUM_STEPS):
        state, metrics = step(state, make_batch(random))
        losses.append(metrics.loss)
    return np.array(jax.device_get(losses)), setup.model, state.variables


trained = {name: train(config) for name, config in (("CCA", cca_config), ("plain", mha_config))}

# %%
batch = make_batch(np.random.default_rng(1))
period = int(TIME - batch.weights_BT[0].sum())
figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), width_ratios=(1.4, 1, 1))
for axis, (name, (losses, model, variables)) in zip(axes[1:], trained.items(), strict=True):
    axes[0].plot(losses, label=f"{name}: {count_parameters(model.config):,} parameters")
    axis.imshow(
        zaya_jax.attention_maps(model, variables, batch.tokens_BT[:1])[0, 0].mean(axis=0), cmap="magma"
    )
    axis.plot(np.arange(1, TIME - period + 1), np.arange(period, TIME), "c:", lw=1)
    axis.set(title=f"{name}: mean of the heads", xlabel="key", ylabel="query")
low = np.log(np.mean([16, 8]))
axes[0].axhline(low, color="k", ls=":", lw=0.8, label="a guess among the tokens of the period")
axes[0].set(xlabel="step", title="loss, nats per token", ylim=(0, None))
axes[0].legend(fontsize=7)
plt.show()

# %%
print(f"{'attention':<12}{'parameters':>12}{'first loss':>12}{'last loss':>12}")
for name, (losses, model, _) in trained.items():
    print(f"{name:<12}{count_parameters(model.config):>12,}{losses[0]:>12.2f}{losses[-10:].mean():>12.2f}")
assert trained["CCA"][0][-10:].mean() < trained["plain"][0][-10:].mean() / 2

# %% [markdown]
# One layer of plain attention sees which tokens occur, but not which one followed which. It needs a second
# layer, or CCA's keys, which contain the previous token.
#
# ## Further reading
#
# - State that decoding carries between chunks: `empty_state`, and the state that `queries_keys_values`
#   returns; see `zaya_jax/model/attention/cca.py`.
# - For sequences that devices share, a variant with memory of previous tokens also accepts `shared`.
# - A custom router is a function like `route` in `zaya_jax/model/router.py`, which recognizes by its weights
#   which kind it is, as "linear" and "mlp" do; `ModelConfig.router` selects it.
# - `CONTRIBUTING.md`, "Add an attention" and "Add a weight"; `tests/model/attention/test_block.py`.
