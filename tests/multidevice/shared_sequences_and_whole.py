"""Trains the same steps where devices share sequences and where one has them whole.

Prints how far apart they end, as JSON. A program, not a test: the number of devices is fixed when jax starts.
`test_shared_sequences.py` runs it.
"""

import dataclasses
import functools
import json
import sys

import jax
import numpy as np
from small_models import EXECUTION, SLIDING, SMALL

from zaya_jax.config import Config, DataConfig, OptimizerConfig, TrainConfig
from zaya_jax.data.batch import PADDING, make_example
from zaya_jax.data.borders import Borders
from zaya_jax.parallel.mesh import data_mesh, place_rows
from zaya_jax.train.programs import compiled_step
from zaya_jax.train.state import abstract_state, init_state, make_setup, shardings

ROWS = 4
BORDERS = Borders(bos_id=1, eos_id=-1, pad_id=0)


def config_of(model, *, length, steps, **execution):
    return Config(
        model=model,
        data=DataConfig(sequence_length=length, batch_size=ROWS),
        optimizer=OptimizerConfig(learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=steps // 2),
        train=TrainConfig(num_steps=steps),
        execution=dataclasses.replace(EXECUTION, **execution),
    )


def batches(length, steps, *, starts=()):
    """Documents of uneven lengths; in the first row they begin at `starts`, and the last one ends early."""
    random, examples = np.random.default_rng(length), []
    for _ in range(steps):
        tokens_BT = random.integers(2, SMALL.vocab_size, (ROWS, length))
        tokens_BT[random.random(tokens_BT.shape) < 0.1] = 1
        tokens_BT[0] = np.maximum(tokens_BT[0], 2)
        tokens_BT[0, list(starts)] = 1
        tokens_BT[-1, length - length // 3 :] = PADDING
        examples.append(make_example(tokens_BT, borders=BORDERS))
    return examples


class Run:
    """The steps of a config, on some devices."""

    def __init__(self, config, devices, ranks):
        self.config = dataclasses.replace(
            config, execution=dataclasses.replace(config.execution, context_devices=ranks)
        )
        self.mesh = data_mesh(devices, context_devices=ranks)
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
    """The largest relative difference in norm of any leaf."""
    pairs = zip(*(jax.tree.leaves(tree) for tree in (ours, theirs)), strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)


def compare(config, layouts, *, starts=()):
    """How far each layout, devices of data times devices of context, is from one device."""
    steps = config.train.num_steps
    examples = batches(config.data.sequence_length, steps, starts=starts)
    one, one_metrics = Run(config, jax.devices()[:1], 1).go(examples)
    found = {}
    for data, ranks in layouts:
        state, metrics = Run(config, jax.devices()[: data * ranks], ranks).go(examples)
        names = ("loss", "gradient_norm", "gradient_norms", "router_counts_LX", "router_entropy_L")
        found[f"{data} x {ranks}"] = {n: difference(getattr(metrics, n), getattr(one_metrics, n)) for n in names} | {
            "weights": difference(state.params, one.params),
            "router_bias": difference(state.router_bias_LX, one.router_bias_LX),
        }
    return found


if __name__ == "__main__":
    model = SLIDING if sys.argv[1] == "sliding" else SMALL
    config = config_of(model, length=int(sys.argv[2]), steps=int(sys.argv[3]), context_attention=sys.argv[4])
    layouts = [tuple(map(int, each.split("x"))) for each in sys.argv[5:]]
    print(json.dumps(compare(config, layouts), indent=1))
