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
# # Muon and AdamW
#
# AdamW divides each element of a gradient by its own magnitude ([Adam] section 3; [AdamW] algorithm 2). Muon
# treats a matrix as a whole: with the momentum M = U S V' it updates the weight by U V', so that all
# directions have the same size ([Muon]; [Moonlight] section 2.1).
#
# ```text
# AdamW   m = b1 m + (1-b1) g     v = b2 v + (1-b2) g^2     update = m' / (sqrt(v') + eps)
# Muon    M = 0.95 M + 0.05 G     look ahead (Nesterov)     update = 0.2 sqrt(max(rows, columns)) U V'
# ```
#
# The factor gives Muon's update AdamW's root mean square, so that both use one learning rate ([Moonlight]
# section 2.2). In ZAYA1 Muon updates the matrices, and AdamW all other weights.
#
# Letters: M matrices, R rows, C columns, B batch, T time, V vocabulary.

# %%
import functools
import os

# The examples are small and spend most of their time on compilation: the compiler need not optimize.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

import zaya_jax
from zaya_jax.model.weights import declare, flatten_weights, initialize
from zaya_jax.model.zaya import forward, initial_router_bias
from zaya_jax.optim.matrices import matrix_axes, matrix_sides, to_matrices
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.optim.newton_schulz import POLYNOMIALS

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## Without a decomposition: Newton-Schulz
#
# U V' is not computed by a singular value decomposition, which is slow on GPUs, but by an iterated polynomial
# of the matrix, X <- a X + b (X X') X + c (X X')^2 X. It maps each singular value x to a x + b x^3 + c x^5
# and leaves U and V unchanged, so the whole iteration is a function of one variable. Five steps of Jordan's
# polynomial map every value above 0.003 to between 0.7 and 1.2; Polar Express ([Polar-Express] algorithm 1)
# has a different polynomial for each step.

# %%
x = np.geomspace(1e-4, 1, 400)
figure, axes = plt.subplots(1, 2, figsize=(10, 3), sharey=True)
for axis, (name, polynomials) in zip(axes, POLYNOMIALS.items(), strict=True):
    values = x * polynomials.margin
    for step in range(5):
        a, b, c = polynomials.steps[min(step, len(polynomials.steps) - 1)]
        values = a * values + b * values**3 + c * values**5
        axis.plot(x, values, label=f"{step + 1} steps", alpha=0.3 + 0.7 * (step == 4))
    axis.axhline(1, color="k", lw=0.5)
    axis.set(xscale="log", xlabel="singular value before", title=name)
    if name == "jordan":
        assert 0.65 < values[x > 0.01].min() < values[x > 0.01].max() < 1.25
axes[0].set_ylabel("after the iteration")
axes[0].legend()
plt.show()

# %% [markdown]
# ## A small ZAYA1, and which weight is a matrix
#
# Each weight's declaration states its matrix axes; gate and up of each expert are separate matrices.

# %%
config = zaya_jax.ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    moe_intermediate_size=32,
    num_experts=2,
    router_hidden_size=16,
    rope_theta=10_000.0,
    max_position_embeddings=64,
    initializer_range=0.1,
)
execution = zaya_jax.ExecutionConfig(dtype="float32", remat="none")
declared = flatten_weights(declare(config))
matrices = {path: matrix_axes(weight) for path, weight in declared.items() if weight.matrix is not None}
print(f"{'updated by Muon':<40}{'shape':<20}{'matrices':>9}  of")
for path, axes in matrices.items():
    rows, columns = matrix_sides(declared[path].shape, axes)
    count = declared[path].size // (rows * columns)
    print(f"{path:<40}{declared[path].shape!s:<20}{count:>9}  {rows} x {columns}")
rest = [path for path in declared if path not in matrices]
print(f"by AdamW: {len(rest)} others, {', '.join(rest[:3])}, ...")

# %% [markdown]
# The text: each token has four successors, and token frequencies differ strongly, as in language. Gradients
# therefore have a few strong directions, those of frequent tokens, and many weak ones.

# %%
TIME, BATCH, NUM_STEPS = 32, 16, 80
numbers = np.random.default_rng(7)
zipf_V = 1 / np.arange(1, config.vocab_size + 1)
zipf_V /= zipf_V.sum()
successors_VS = numbers.choice(config.vocab_size, (config.vocab_size, 4), p=zipf_V)


def make_tokens():
    tokens_BT = np.empty((BATCH, TIME + 1), np.int32)
    tokens_BT[:, 0] = numbers.choice(config.vocab_size, BATCH, p=zipf_V)
    for time in range(TIME):
        tokens_BT[:, time + 1] = successors_VS[tokens_BT[:, time], numbers.integers(0, 4, BATCH)]
    return tokens_BT


batches = [make_tokens() for _ in range(NUM_STEPS)]
bias_LX = initial_router_bias(config)


@jax.jit
def loss_and_gradients(weights, tokens_BT):
    def loss(weights):
        params = unflatten_dict(weights, sep="/")
        logits_BTV = forward(config, execution, params, bias_LX, tokens_BT[:, :-1]).logits_BTV
        return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, tokens_BT[:, 1:]).mean()

    return jax.value_and_grad(loss)(weights)


weights = jax.jit(functools.partial(initialize, declare(config)))(jax.random.key(0))
start = flatten_dict(weights, sep="/")

# %% [markdown]
# ## Inside one step
#
# Both optimizers process the same ten gradients of the same weights. The plots show the singular values of
# their updates instead of the gradient's.


# %%
def muon_scale(path):
    """Factor that makes an orthogonal matrix's root mean square 0.2 ([Moonlight] section 2.2)."""
    return 0.2 * max(matrix_sides(declared[path].shape, matrices[path])) ** 0.5


adamw = optax.scale_by_adam(0.9, 0.95)
muon = optax.chain(
    scale_by_muon(matrices),
    optax.stateless(lambda updates, _: {path: x * muon_scale(path) for path, x in updates.items()}),
)


def only_matrices(tree):
    return {path: tree[path] for path in matrices}


optimizers = {"AdamW": adamw, "Muon": muon}
update_of = {name: jax.jit(optimizer.update) for name, optimizer in optimizers.items()}
states = {name: optimizer.init(only_matrices(start)) for name, optimizer in optimizers.items()}
updates = {}
for tokens_BT in batches[:10]:
    gradients = only_matrices(loss_and_gradients(start, tokens_BT)[1])
    for name in optimizers:
        updates[name], states[name] = update_of[name](gradients, states[name])
updates = {"gradient": gradients} | updates


def spectrum(x, path):
    """Singular values of the first matrix of a weight, relative to the largest."""
    values = np.linalg.svd(np.asarray(to_matrices(x, matrices[path])[0]), compute_uv=False)
    return values / values[0]


SHOWN = ("layers/attention/q_proj", "layers/attention/o_proj", "layers/experts/down_proj")
figure, axes = plt.subplots(1, len(SHOWN), figsize=(11, 3.2), sharey=True)
for axis, path in zip(axes, SHOWN, strict=True):
    for name, tree in updates.items():
        axis.plot(spectrum(tree[path], path), "o-", ms=3, label=name)
    axis.set(yscale="log", ylim=(1e-3, 1.5), title=path.removeprefix("layers/"), xlabel="number")
axes[0].set_ylabel("singular value / largest")
axes[0].legend()
plt.show()

# %%
print(f"{'weight':<40}{'optimiser':<10}{'RMS':>8}{'smallest / largest':>20}{'effective rank':>16}")
for path in SHOWN:
    for name, tree in updates.items():
        values, rms = spectrum(tree[path], path), float(jnp.sqrt(jnp.mean(tree[path] ** 2)))
        shares = values / values.sum()
        rank = np.exp(-np.sum(shares * np.log(np.maximum(shares, 1e-12))))
        print(f"{path:<40}{name:<10}{rms:>8.4f}{values[-1]:>20.3f}{rank:>11.1f} / {len(values)}")
    assert spectrum(updates["Muon"][path], path)[-1] > spectrum(updates["AdamW"][path], path)[-1]
for path in matrices:
    assert 0.1 < float(jnp.sqrt(jnp.mean(updates["Muon"][path] ** 2))) < 0.3

# %% [markdown]
# The effective rank is the exponential of the entropy of the singular values: the number of directions in an
# update. The gradient has few; AdamW's division raises some; Muon's are nearly equal, between 0.7 and 1.2,
# except for those below 0.003 of the total, which five steps raise only partially. The RMS of Muon is near
# 0.2 by construction. That of AdamW is near 1 in the first steps of a run, where each element has a history
# of similar magnitudes, and between 0.2 and 0.4 later in large runs ([Moonlight] section 2.2): hence one
# learning rate for both.
#
# ## Eighty steps
#
# In both runs AdamW updates the weights that are not matrices.

# %%
RATES = (3e-3, 1e-2, 3e-2)
groups = {path: "matrix" if path in matrices else "rest" for path in declared}


def make_run(matrix_optimizer):
    """A jitted step of all weights, with the learning rate as an argument."""
    optimizer = optax.partition(
        {"matrix": matrix_optimizer, "rest": adamw}, lambda tree: {path: groups[path] for path in tree}
    )

    @jax.jit
    def move(weights, gradients, state, rate):
        updates, state = optimizer.update(gradients, state)
        return {path: x - rate * updates[path] for path, x in weights.items()}, state

    return optimizer.init, move


masked = {path: optax.MaskedNode() for path in rest}
whole_muon = optax.chain(
    scale_by_muon(matrices | masked),
    optax.stateless(
        lambda updates, _: {
            path: x * muon_scale(path) if path in matrices else x for path, x in updates.items()
        }
    ),
)
losses = {}
for name, optimizer in (("AdamW", adamw), ("Muon", whole_muon)):
    init, move = make_run(optimizer)
    for rate in RATES:
        weights, state, history = start, init(start), []
        for number, tokens_BT in enumerate(batches):
            loss, gradients = loss_and_gradients(weights, tokens_BT)
            weights, state = move(weights, gradients, state, rate * (1 - number / NUM_STEPS))
            history.append(loss)
        losses[name, rate] = np.array(jax.device_get(history))

figure, axis = plt.subplots(figsize=(8, 3.4))
for (name, rate), history in losses.items():
    smooth = np.convolve(history, np.ones(5) / 5, "valid")
    axis.plot(
        smooth, {"AdamW": "--", "Muon": "-"}[name], color=f"C{RATES.index(rate)}", label=f"{name}, {rate:g}"
    )
axis.axhline(np.log(4), color="k", lw=0.5, label="ln 4: a guess among successors")
axis.set(xlabel="step", ylabel="nats per token, mean of 5 steps", title="by optimiser and learning rate")
axis.legend(fontsize=7, ncols=2)
plt.show()
ends = {key: history[-10:].mean() for key, history in losses.items()}
for name in optimizers:
    best = min(RATES, key=lambda rate: ends[name, rate])
    print(
        f"{name:<7} last ten steps, by rate:",
        *(f"{rate:g}: {ends[name, rate]:.3f}" for rate in RATES),
        f"best {best:g}",
    )
assert min(ends.values()) < losses["Muon", RATES[0]][0] - 1

# %% [markdown]
# A network of this size cannot decide between the two; it shows how they work. Muon costs five iterations of
# three products per matrix and step, and each matrix must be whole on one device: `optim/partition.py`
# assigns them. `zaya bench optimizers` compares their losses, and `zaya plan` counts the operations with and
# without that assignment.
