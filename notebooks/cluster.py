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
# What does ZAYA1-8B need on a given cluster: how much memory, how long is a step, what is the bottleneck, and
# what do failures cost? `zaya plan` answers by arithmetic on declared shapes, without a GPU and without
# allocating anything. This notebook calls the same functions. Set the four constants below to your own
# values.
#
# The end lists what arithmetic cannot know. `zaya plan --compile` compiles the step for your GPU.

# %%
import dataclasses

import matplotlib.pyplot as plt
import numpy as np

from zaya_jax.options import load_config
from zaya_jax.plan.devices import Cluster, find_device
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.plan.output.plan import make_plan
from zaya_jax.plan.reliability import Failures, best_interval, expect, mean_seconds_between_failures
from zaya_jax.plan.shares import num_groups

plt.rcParams["figure.constrained_layout.use"] = True

CONFIG = "configs/zaya1_8b.py"  # or your own file
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
print(f"per step: {phase.data.batch_size:,} sequences of {phase.data.sequence_length:,} tokens")

# %% [markdown]
# ## Memory: which micro-batch fits
#
# The state is partitioned over all GPUs (ZeRO-1, [ZeRO] section 5.1): each holds a part of the float32
# weights and momenta. Weights and gradients in the dtype of the products are whole on each GPU, and the
# activations of the backward pass grow with the number of sequences at a time: the micro-batch.

# %%
MICRO_BATCHES = (1, 2, 4)


def with_micro_batch(rows, gpus):
    """The phase with `rows` sequences per GPU and microbatch; the batch of a step does not change."""
    parts = phase.data.batch_size // (rows * num_groups(phase, gpus))
    return dataclasses.replace(phase, execution=dataclasses.replace(phase.execution, num_microbatches=parts))


by_rows = {}
for rows in MICRO_BATCHES:
    by_rows[rows] = memory_by_kind(with_micro_batch(rows, num_gpus), num_gpus)
activations = {
    rows: [name for name in kinds if name.startswith("activations")] for rows, kinds in by_rows.items()
}
# The names of activations include the number of tokens: use one name for all of them here.
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
axis.set(xlabel="GiB per GPU", title=f"{num_gpus:,} GPUs, by sequences per GPU and microbatch")
axis.set_yticks(range(len(MICRO_BATCHES)), [f"micro-batch {rows}" for rows in MICRO_BATCHES])
axis.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
plt.show()
totals = {rows: sum(kinds.values()) for rows, kinds in by_rows.items()}
fits = [rows for rows in MICRO_BATCHES if totals[rows] < device.memory_bytes]
print("GiB per GPU:", {rows: round(total / GIB, 1) for rows, total in totals.items()}, "fits:", fits)
assert totals[1] < totals[2] < totals[4]

# %% [markdown]
# ## Time: which resource is the bottleneck
#
# The bars are the minimum time of each resource per step, from data-sheet figures: operations over peak,
# bytes over bandwidth, messages over links. The traffic between nodes does not depend on the number of nodes,
# while each GPU has less to compute. Within a node, each microbatch gathers the experts that its GPUs share
# (`execution.node_devices`): fewer and larger microbatches are cheaper.

# %%
plans = {}
for nodes, rows in ((NODES // 16, 4), (NODES // 4, 4), (NODES, 4), (NODES, 1)):
    cluster = Cluster(device=device, nodes=nodes, gpus_per_node=GPUS_PER_NODE)
    plans[nodes, rows] = make_plan(with_micro_batch(rows, cluster.num_gpus), cluster)

figure, axis = plt.subplots(figsize=(8, 3.2))
for (_, rows), plan in plans.items():
    seconds = np.array(list(plan.bounds.values()))
    label = f"{plan.num_gpus:,} GPUs, micro-batch {rows}"
    axis.plot(1e3 * seconds, range(len(seconds)), "o" if rows == 4 else "x", ms=9, label=label)
axis.set_yticks(range(len(seconds)), list(plan.bounds))
axis.set(xscale="log", xlabel="minimum ms per step (log scale)")
axis.grid(alpha=0.3)
axis.legend(fontsize=7)
plt.show()

print(f"{'GPUs':>6}{'micro-batch':>13}{'tokens/GPU':>14}{'in turn, ms':>13}{'tokens/s/GPU':>14}  bound by")
for (_, rows), plan in plans.items():
    own, seconds = plan.tokens / plan.num_gpus, plan.seconds_in_turn
    turn = f"{1e3 * seconds:>13,.0f}{own / seconds:>14,.0f}"
    print(f"{plan.num_gpus:>6,}{rows:>13}{own:>14,.0f}{turn}  {plan.bound}")
assert plans[NODES, 4].seconds_in_turn < plans[NODES, 1].seconds_in_turn

# %% [markdown]
# "In turn" is an estimate, not a bound: products at a share of the peak, then everything else one after the
# other, without overlap. `zaya plan --compile` models the compiled step with its overlap.
#
# ## Failures: how often to write a checkpoint
#
# The more GPUs, the sooner one fails. A short interval waits for checkpoints, a long one loses steps. The
# model is Daly's (Future Generation Computer Systems 22, 2006, page 303), with the worse of the failure rates
# that [Reliability] and [Llama-3] section 3.3.4 report.

# %%
STALL, RESTART = 1.0, 60.0  # seconds that steps wait for a checkpoint; from a failure to the first new step
intervals = np.geomspace(10, 4 * 3600, 60)
figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.2))
best = {}
for gpus in (64, num_gpus, 16 * num_gpus):
    failures = Failures(mean_seconds_between_failures(gpus), 60.0, STALL, RESTART)
    shares = [expect(dataclasses.replace(failures, interval=interval)).productive for interval in intervals]
    best[gpus] = dataclasses.replace(failures, interval=best_interval(failures))
    hours = failures.mean_seconds / 3600
    left.plot(intervals / 60, shares, label=f"{gpus:,} GPUs: a failure every {hours:,.1f} h")
    left.plot(best[gpus].interval / 60, expect(best[gpus]).productive, "k.")
left.set(xscale="log", xlabel="minutes between checkpoints", ylabel="productive share", ylim=(0.6, 1.01))
left.legend(fontsize=7)
bottom = np.zeros(len(best))
for part in ("stall", "lost", "restart"):
    shares = np.array([getattr(expect(failures), part) for failures in best.values()])
    right.bar(range(len(best)), shares, bottom=bottom, label=part)
    bottom += shares
right.set(title="lost time at the best interval", ylabel="share of the time")
right.set_xticks(range(len(best)), [f"{gpus:,} GPUs" for gpus in best])
right.legend()
plt.show()
for gpus, failures in best.items():
    share = expect(failures).productive
    print(f"{gpus:>7,} GPUs: every {failures.interval / 60:5.1f} min, {share:.1%} productive")
assert best[64].interval > best[num_gpus].interval > best[16 * num_gpus].interval

# %% [markdown]
# ## Limits
#
# - Peaks are from data sheets, times of collectives from published runs. `zaya bench collectives --json` and
#   `zaya bench gemm --json` measure your machine, and `zaya plan --measured=FILE` uses the results.
# - The compiler reuses some memory and needs additional buffers: `--compile` reports the total, and
#   `--search` finds the largest micro-batch that fits.
# - A stall of a second and a restart of a minute are goals. `zaya plan failures --run=RUN` measures a run
#   that was restarted.
