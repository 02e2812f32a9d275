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
# # A plan for your cluster
#
# What does ZAYA1-8B need on so many GPUs: how much memory, how long a step, what is waited for, and what do
# failures cost? `zaya plan` answers by arithmetic on declared shapes, without a GPU and without allocating
# anything. This notebook calls the same functions. Set the four lines below to your own.
#
# What arithmetic cannot know is said at the end. `zaya plan --compile` asks the compiler for your GPU.

# %%
import dataclasses

import matplotlib.pyplot as plt
import numpy as np

from zaya_jax.options import load_config
from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.failures import Failures, best_interval, expect, mean_seconds_between_failures
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.report import make_plan
from zaya_jax.plan.shares import num_groups

plt.rcParams["figure.constrained_layout.use"] = True

CONFIG = "configs/zaya1_8b.py"  # or a file of your own
DEVICE = "mi300x"  # `zaya plan devices` lists them
NODES, GPUS_PER_NODE = 128, 8
GIB = 2**30

# %%
run = load_config(CONFIG, [])
phase = run.resolved_phases[0].config
phase = dataclasses.replace(phase, data=dataclasses.replace(phase.data, batch_ramp=()))
device = find_device(DEVICE)
num_gpus = NODES * GPUS_PER_NODE
print(f"{CONFIG}, {num_gpus:,} x {device.name}, {device.memory_bytes / GIB:.0f} GiB each")
print(f"a step: {phase.data.batch_size:,} sequences of {phase.data.sequence_length:,} tokens")

# %% [markdown]
# ## Memory: which micro-batch fits
#
# The state is cut over all GPUs (ZeRO-1, [ZeRO] section 5.1): of float32 weights and momenta each has a part.
# Weights and gradients as products take them are whole on each, and what a backward pass keeps grows with the
# sequences that are under way at a time: the micro-batch.

# %%
MICRO_BATCHES = (1, 2, 4)


def with_micro_batch(rows, gpus):
    """The phase with so many sequences under way on a GPU at a time; the batch of a step stays what it is."""
    parts = phase.data.batch_size // (rows * num_groups(phase, gpus))
    return dataclasses.replace(phase, execution=dataclasses.replace(phase.execution, num_microbatches=parts))


by_rows = {}
for rows in MICRO_BATCHES:
    by_rows[rows] = memory_by_kind(with_micro_batch(rows, num_gpus), num_gpus)
activations = {
    rows: [name for name in kinds if name.startswith("activations")] for rows, kinds in by_rows.items()
}
# The names of activations say how many tokens they are of: one name for all of them here.
rows_of = {
    rows: {
        name.partition(" of ")[0] if name in activations[rows] else name: size for name, size in kinds.items()
    }
    for rows, kinds in by_rows.items()
}
kinds = sorted({name for kinds in rows_of.values() for name, size in kinds.items() if size > GIB / 10})

figure, axis = plt.subplots(figsize=(9, 3.6))
bottom = np.zeros(len(MICRO_BATCHES))
for color, kind in enumerate(kinds):
    sizes = np.array([rows_of[rows].get(kind, 0) / GIB for rows in MICRO_BATCHES])
    axis.barh(range(len(MICRO_BATCHES)), sizes, left=bottom, label=kind, color=plt.cm.tab20(color))
    bottom += sizes
axis.axvline(device.memory_bytes / GIB, color="r", ls="--", label=f"memory of {device.name}")
axis.set(xlabel="GiB a GPU", title=f"{num_gpus:,} GPUs, by the sequences under way on each")
axis.set_yticks(range(len(MICRO_BATCHES)), [f"micro-batch {rows}" for rows in MICRO_BATCHES])
axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
totals = {rows: sum(kinds.values()) for rows, kinds in by_rows.items()}
fits = [rows for rows in MICRO_BATCHES if totals[rows] < device.memory_bytes]
print("GiB a GPU:", {rows: round(total / GIB, 1) for rows, total in totals.items()}, "fits:", fits)
assert totals[1] < totals[2] < totals[4]

# %% [markdown]
# ## Time: what is waited for
#
# The least that each resource needs for a step, by its figure on paper: operations over peak, bytes over
# bandwidth, messages over links. What passes between nodes is the same whatever their number, while each GPU
# has less to compute for it. In a node each microbatch gathers the experts that its GPUs share
# (`execution.node_devices`): fewer and larger ones pay.

# %%
plans = {}
for nodes, rows in ((NODES // 16, 4), (NODES // 4, 4), (NODES, 4), (NODES, 1)):
    cluster = Cluster(device=device, nodes=nodes, gpus_per_node=GPUS_PER_NODE)
    plans[nodes, rows] = make_plan(with_micro_batch(rows, cluster.num_gpus), cluster)

figure, axis = plt.subplots(figsize=(8, 3.2))
for (_, rows), plan in plans.items():
    seconds = np.array(list(plan.seconds.values()))
    label = f"{plan.num_gpus:,} GPUs, micro-batch {rows}"
    axis.plot(1e3 * seconds, range(len(seconds)), "o" if rows == 4 else "x", ms=9, label=label)
axis.set_yticks(range(len(seconds)), list(plan.seconds))
axis.set(xscale="log", xlabel="ms a step, at least (log scale)")
axis.grid(alpha=0.3)
axis.legend(fontsize=7)
plt.show()

print(f"{'GPUs':>6}{'micro-batch':>13}{'tokens a GPU':>14}{'in turn, ms':>13}{'tokens/s/GPU':>14}  bound by")
for (_, rows), plan in plans.items():
    own, seconds = plan.tokens / plan.num_gpus, plan.seconds_in_turn
    turn = f"{1e3 * seconds:>13,.0f}{own / seconds:>14,.0f}"
    print(f"{plan.num_gpus:>6,}{rows:>13}{own:>14,.0f}{turn}  {plan.bound}")
assert plans[NODES, 4].seconds_in_turn < plans[NODES, 1].seconds_in_turn

# %% [markdown]
# "In turn" is a cautious sum: products at a share of the peak, then all else one after the other, as if
# nothing overlapped. `zaya plan --compile` replays the compiled step, with what overlaps.
#
# ## Failures: how often to write a checkpoint
#
# The more GPUs, the sooner one fails. A short interval waits for checkpoints, a long one loses steps. The
# model is Daly's (Future Generation Computer Systems 22, 2006, page 303), the rate of failures the worse of
# what [Reliability] and [Llama-3] section 3.3.4 tell of their clusters.

# %%
STALL, RESTART = 1.0, 60.0  # seconds that steps wait for a checkpoint; from a failure to the first new step
intervals = np.geomspace(10, 4 * 3600, 60)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2))
best = {}
for gpus in (64, num_gpus, 16 * num_gpus):
    given = Failures(mean_seconds_between_failures(gpus), 60.0, STALL, RESTART)
    shares = [expect(dataclasses.replace(given, interval=interval)).productive for interval in intervals]
    best[gpus] = dataclasses.replace(given, interval=best_interval(given))
    left.plot(intervals / 60, shares, label=f"{gpus:,} GPUs: a failure in {given.mean_seconds / 3600:,.1f} h")
    left.plot(best[gpus].interval / 60, expect(best[gpus]).productive, "k.")
left.set(xscale="log", xlabel="minutes between checkpoints", ylabel="productive share", ylim=(0.6, 1.01))
left.legend(fontsize=7)
bottom = np.zeros(len(best))
for part in ("stall", "lost", "restart"):
    shares = np.array([getattr(expect(given), part) for given in best.values()])
    right.bar(range(len(best)), shares, bottom=bottom, label=part)
    bottom += shares
right.set(title="what is lost at the best interval", ylabel="share of the time")
right.set_xticks(range(len(best)), [f"{gpus:,} GPUs" for gpus in best])
right.legend()
plt.show()
for gpus, given in best.items():
    print(f"{gpus:>7,} GPUs: every {given.interval / 60:5.1f} min, {expect(given).productive:.1%} productive")
assert best[64].interval > best[num_gpus].interval > best[16 * num_gpus].interval

# %% [markdown]
# ## What is not in it
#
# - Figures of links and peaks are those on paper. `zaya bench collectives --json` and `zaya bench gemm
#   --json` measure yours, and `zaya plan --measured=FILE` takes them.
# - The compiler reuses some memory and needs some more: `--compile` says how much, `--search` finds the
#   largest micro-batch that fits.
# - A stall of a second and a restart of a minute are aims. `zaya plan failures --run=RUN` reads what a run
#   that was begun anew went through.
