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
# # A longer context: another RoPE base and a short phase
#
# ZAYA1-8B is first trained at 4,096 tokens, and then at 32,768 and 131,072, with a larger base of its rotary
# embedding each time ([ZAYA1-8B] Table II). This notebook does the same at a hundredth of the size, in a
# minute. `needle.py` does it with real phases of `zaya train`, up to 16,384 tokens on several devices.
#
# ```text
# pair i of a head's channels rotates by   position x base^(-2i / rotary channels)    ([RoPE] section 3.4.2)
# a score depends on the distance alone:    q' R(t - s) k
# ```
#
# Letters: B batch, T time.

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
from zaya_jax.data.corpora.delimiters import NO_DELIMITERS
from zaya_jax.data.reading.batch import make_example
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

plt.rcParams["figure.constrained_layout.use"] = True

# %% [markdown]
# ## Angles in longer sequences
#
# At 32 training tokens, each channel pair has rotated by at most 31 times its frequency. Slow pairs have not
# completed a turn by then: at 128 tokens they reach angles that were never trained. A larger base slows them
# down, so that they stay within the trained range. Fast pairs have covered all angles, and still distinguish
# neighboring tokens.

# %%
SHORT, LONG = 32, 128
BASES = {"short": 100.0, "long": 10_000.0}
HEAD = 16
distance_T = np.arange(LONG)
figure, axes = plt.subplots(1, 3, figsize=(12, 3), width_ratios=(1, 1, 1.3))
for axis, base in zip(axes, BASES.values(), strict=False):
    angles = distance_T[:, None] * base ** (-np.arange(0, HEAD, 2) / HEAD)
    axis.imshow(np.cos(angles).T, cmap="RdBu", aspect="auto", vmin=-1, vmax=1)
    axis.axvline(SHORT, color="k")
    axis.set(title=f"base {base:,.0f}: cosine of each pair", xlabel="distance", ylabel="pair")
    axes[2].plot(np.cos(angles).mean(axis=1), label=f"base {base:,.0f}")
axes[2].axvspan(0, SHORT, color="0.9", label="trained")
axes[2].set(title="score of equal vectors, relative to the maximum", xlabel="distance")
axes[2].legend()
plt.show()

# %% [markdown]
# ## A run in two phases
#
# The task is that of `cca.py`: a few tokens are repeated with a different period in each sequence, so
# predicting the next one requires looking back a whole period. All channels of a head rotate here; in ZAYA1
# half of them do, and the others match a token at any distance, which is part of why it extends so well.
#
# A phase overrides fields of the config. `resolved_phases` contains the config of each phase; the state
# carries over from one to the next: weights, momenta and balancing biases.

# %%
run = zaya_jax.Config.from_dict(
    {
        "model": {
            "vocab_size": 96,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": HEAD,
            "partial_rotary_factor": 1.0,
            "moe_intermediate_size": 32,
            "num_experts": 2,
            "router_hidden_size": 8,
            "rope_theta": BASES["short"],
            "max_position_embeddings": LONG,
            "initializer_range": 0.1,
        },
        "data": {"sequence_length": SHORT, "batch_size": 32},
        "optimizer": {
            "schedule": "constant", "learning_rate": 1e-2, "warmup_steps": 5, "weight_decay": 0.0,
        },
        "execution": {"dtype": "float32"},
        "phases": [
            {"name": "short", "steps": 140},
            {
                "name": "long",
                "steps": 40,
                "model": {"rope_theta": BASES["long"]},
                "data": {"sequence_length": LONG, "batch_size": 8},
                "optimizer": {"learning_rate": 3e-3, "warmup_steps": 0},
            },
        ],
    }
)  # fmt: skip
short, long = run.resolved_phases
print(
    *(f"{phase.name}: steps {phase.first_step + 1} to {phase.end}" for phase in run.resolved_phases), sep="\n"
)


def make_batch(random, batch_size, time, periods):
    """Repeated tokens; only targets that can be predicted count, from the second copy on."""
    rows, weights = [], []
    for _ in range(batch_size):
        period = random.integers(periods[0], periods[1] + 1)
        rows.append(np.resize(random.permutation(run.model.vocab_size)[:period], time + 1))
        weights.append(np.arange(time) >= period)
    tokens_BT = np.stack(rows)
    batch = make_example(tokens_BT[:, :-1], delimiters=NO_DELIMITERS, targets_BT=tokens_BT[:, 1:])
    return dataclasses.replace(batch, weights_BT=np.float32(weights))


mesh, random, losses = data_mesh(jax.devices()[:1]), np.random.default_rng(0), []
state, learned = None, {}
for phase in run.resolved_phases:
    setup, data = make_setup(phase.config), phase.config.data
    placed = shardings(abstract_state(phase.config, setup, mesh), mesh)
    if state is None:
        state = jax.jit(functools.partial(init_state, phase.config, setup), out_shardings=placed)()
    step = compiled_step(state, setup=setup, mesh=mesh)
    for _ in range(phase.num_steps):
        batch = make_batch(random, data.batch_size, data.sequence_length, (8, data.sequence_length // 2))
        state, metrics = step(state, batch)
        losses.append(metrics.loss)
    learned[phase.name] = jax.device_get(state.variables)

# %% [markdown]
# ## Accuracy by distance
#
# All three use the same sequences of 128 tokens: the weights after the first phase with its own base, the
# same weights with the larger base and no further training, and the weights after the second phase.

# %%
PERIODS = (8, 16, 24, 32, 48, 64)


def accuracies(variables, phase):
    """The share of right answers for each period."""
    model = zaya_jax.Zaya(phase.config.model, phase.config.execution)
    likeliest = jax.jit(lambda tokens_BT: model.apply(variables, tokens_BT).logits_BTV.argmax(-1))
    shares = []
    for period in PERIODS:
        batch = make_batch(np.random.default_rng(period), 8, LONG, (period, period))
        right_BT = np.asarray(likeliest(batch.tokens_BT)) == batch.targets_BT
        shares.append(right_BT[batch.weights_BT > 0].mean())
    return np.array(shares)


results = {
    "trained at 32": accuracies(learned["short"], short),
    "the same, larger base": accuracies(learned["short"], long),
    "then 40 steps at 128": accuracies(learned["long"], long),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3))
left.plot(jax.device_get(losses))
left.axvline(short.end, color="r", lw=1, label="the second phase begins")
left.set(xlabel="step", ylim=(0, None), title="loss, nats per predictable token")
left.legend()
for name, shares in results.items():
    right.plot(PERIODS, shares, "o-", label=name)
right.axvspan(8, SHORT // 2, color="0.9")
right.set(xlabel="period: how far back one must look", ylim=(-0.05, 1.05), title="right at 128 tokens")
right.legend()
plt.show()

# %%
print(f"{'period':<24}" + "".join(f"{period:>7}" for period in PERIODS))
for name, shares in results.items():
    print(f"{name:<24}" + "".join(f"{share:>7.0%}" for share in shares))
before, rebased, after = results.values()
assert before[:2].min() > 0.9
assert before[-1] < 0.3
assert rebased[-1] > 0.5
assert after.min() > 0.95

# %% [markdown]
# The first network fails beyond the periods that it was trained on. The larger base alone, without a training
# step, recovers most of it: angles that would have been new become small ones that it knows. A few steps on
# long sequences recover the rest. The recipe of the full-size run is the same.
