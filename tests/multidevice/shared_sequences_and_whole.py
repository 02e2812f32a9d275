"""Trains the same steps with shared sequences and with whole ones, and prints the differences as JSON.

It is a program, not a test, because the number of devices is fixed when jax starts;
`test_shared_sequences.py` runs it.
"""

import dataclasses
import functools
import json
import re
import sys

import jax
import numpy as np
from small_models import EXECUTION, SLIDING, SMALL
from whole_params import whole_params

from zaya_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.reading.batch import PADDING, make_example
from zaya_jax.parallel.mesh import batch_sharding, data_mesh, place_rows
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import abstract_state, init_state, make_setup, shardings

ROWS = 4
DELIMITERS = DocumentDelimiters(bos_id=1, eos_id=-1, pad_id=0)


def config_of(model, *, length, steps, **execution):
    return Config(
        model=model,
        data=DataConfig(sequence_length=length, batch_size=ROWS),
        optimizer=OptimizerConfig(learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=steps // 2),
        train=TrainConfig(num_steps=steps),
        execution=dataclasses.replace(EXECUTION, **execution),
    )


def batches(length, steps, *, starts=()):
    """Returns documents of uneven lengths; in the first row they begin at `starts`, and the last one ends
    early.
    """
    random, examples = np.random.default_rng(length), []
    for _ in range(steps):
        tokens_BT = random.integers(2, SMALL.vocab_size, (ROWS, length))
        tokens_BT[random.random(tokens_BT.shape) < 0.1] = 1
        tokens_BT[0] = np.maximum(tokens_BT[0], 2)
        tokens_BT[0, list(starts)] = 1
        tokens_BT[-1, length - length // 3 :] = PADDING
        examples.append(make_example(tokens_BT, delimiters=DELIMITERS))
    return examples


class Run:
    """Training steps of a config on some devices."""

    def __init__(self, config, devices, ranks, node_devices=1):
        shares = {"context_devices": ranks, "node_devices": node_devices}
        self.config = dataclasses.replace(config, execution=dataclasses.replace(config.execution, **shares))
        self.mesh = data_mesh(devices, **shares)
        self.setup = make_setup(self.config, self.mesh.size)
        self.abstract = abstract_state(self.config, self.setup, self.mesh)
        self.step = compiled_step(self.abstract, setup=self.setup, mesh=self.mesh)

    def go(self, examples):
        init = functools.partial(init_state, self.config, self.setup)
        state = jax.jit(init, out_shardings=shardings(self.abstract, self.mesh))()
        history = []
        for batch in examples:
            state, metrics = self.step(state, place_rows(batch, self.mesh))
            history.append(jax.device_get(metrics))
        return jax.device_get(state), jax.tree.map(lambda *values: np.stack(values), *history)


def difference(ours, theirs):
    """Returns the maximum relative difference in norm over all leaves."""
    pairs = zip(*(jax.tree.leaves(tree) for tree in (ours, theirs)), strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)


def compare(config, layouts, *, starts=()):
    """Compares layouts (devices of data, of context and of a node) with one device."""
    examples = batches(config.data.sequence_length, config.train.num_steps, starts=starts)
    one = Run(config, jax.devices()[:1], 1).go(examples)
    return {
        f"{data} x {ranks}, {node}": apart(
            Run(config, jax.devices()[: data * ranks], ranks, node).go(examples), one
        )
        for data, ranks, node in layouts
    }


def apart(run, other):
    """Returns the differences of two runs' weights, biases and metrics."""
    (state, metrics), (other_state, other_metrics) = run, other
    names = ("loss", "gradient_norm", "gradient_norms", "router_counts_LX", "router_entropy_L")
    return {n: difference(getattr(metrics, n), getattr(other_metrics, n)) for n in names} | {
        "weights": difference(whole_params(state), whole_params(other_state)),
        "router_bias": difference(state.router_bias_LX, other_state.router_bias_LX),
    }


def messages(form):
    """Returns shapes and types of the messages in the compiled step of four devices that share a sequence.

    Each message of a layer occurs once, because layers are a loop.
    """
    config = config_of(SMALL, length=32, steps=2, context_attention=form)
    run = Run(config, jax.devices()[:4], 4)
    batch = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(run.mesh)), batches(32, 1)[0]
    )
    text = run.step.lower(run.abstract, batch).as_text()
    kinds = ("all_gather", "reduce_scatter", "collective_permute")
    return {
        kind: re.findall(rf"stablehlo\.{kind}\b.*?-> tensor<([^>]*)>", text, flags=re.DOTALL)
        for kind in kinds
    }


def train(what):
    """Small cases of each kind: document boundaries on, before and after those of chunks.

    Nodes are larger, and smaller, than the group of devices of a sequence.
    """
    if what == "gathered":  # windows of 5 and chunks of 4; rows are shared as well
        config, layouts, starts = (
            config_of(SLIDING, length=32, steps=3),
            [(2, 4, 1), (2, 4, 8)],
            (3, 8, 13, 16, 29),
        )
    else:  # one token per chunk: the convolutions span three of them
        config, layouts, starts = config_of(SLIDING, length=16, steps=3), [(1, 8, 2)], (2, 9)
        config = dataclasses.replace(
            config, execution=dataclasses.replace(config.execution, context_attention="ring", remat="layer")
        )
    return compare(config, layouts, starts=starts)


def campaign(seed):
    """A random shape over 20 steps."""
    random = np.random.default_rng(seed)
    ranks, data = (int(random.choice(sizes)) for sizes in ([2, 4, 8], [1, 2]))
    data = min(data, 8 // ranks)
    length = 2 * ranks * int(random.integers(1, 6))
    model = dataclasses.replace(
        SLIDING if random.random() < 0.5 else SMALL,
        **({"cca_time0": 3} if random.random() < 0.3 else {}),
    )
    form, remat = str(random.choice(["gathered", "ring"])), str(random.choice(["none", "products", "layer"]))
    starts = random.integers(1, length, 3).tolist()
    examples = batches(length, 20, starts=starts)

    def run(devices, ranks, remat):
        config = config_of(model, length=length, steps=20, context_attention=form, remat=remat)
        return Run(config, jax.devices()[:devices], ranks).go(examples)

    one = run(1, 1, remat)
    return {
        "case": [ranks, data, length, form, remat, starts],
        "shared": apart(run(data * ranks, ranks, remat), one),
        # A control with the same sums in another order: the effect of rounding alone.
        "rounding": apart(run(1, 1, "none" if remat == "layer" else "layer"), one),
    }


if __name__ == "__main__":
    what, argument = sys.argv[1:]
    actual = {"train": train, "messages": messages, "campaign": lambda seed: campaign(int(seed))}[what](
        argument
    )
    print(json.dumps(actual))
