"""Trains the same steps on eight devices, on one, and on others from the checkpoint of the eight.

Prints the differences, and the collectives of the program for eight devices, as JSON. It is a program, not a
test, because the number of devices is fixed when jax starts; `test_multidevice.py` runs it.
"""

import collections
import dataclasses
import functools
import json
import math
import re
import sys
import tempfile

import hlo
import jax
import numpy as np
from small_models import EXECUTION, SMALL
from whole_params import whole_params

from zaya_jax.checkpoint import Checkpoints, Retention, restore, restore_average
from zaya_jax.config import Config, DataConfig, EmaConfig, LoraConfig, OptimizerConfig, TrainConfig
from zaya_jax.data.corpora.delimiters import DocumentDelimiters
from zaya_jax.data.reading.batch import PADDING, make_example
from zaya_jax.parallel.mesh import data_mesh, sharded
from zaya_jax.plan.arithmetic import optimizer_flops
from zaya_jax.train.compiled_programs import compiled_step
from zaya_jax.train.step.state import (
    abstract_state,
    checkpoint_shardings,
    from_checkpoint,
    init_state,
    make_setup,
    shardings,
    to_checkpoint,
)

STEPS, HALF, ROWS, TIME = 12, 6, 16, 16
CONFIG = Config(
    # 9 experts and 3 of all other matrices: neither divides by 8
    model=dataclasses.replace(SMALL, num_hidden_layers=3, num_experts=3),
    data=DataConfig(sequence_length=TIME, batch_size=ROWS),
    optimizer=OptimizerConfig(learning_rate=1e-3, final_learning_rate=1e-4, warmup_steps=5),
    train=TrainConfig(num_steps=STEPS),
    ema=EmaConfig(decay=0.9),
    execution=EXECUTION,
)
IN_BFLOAT16 = dataclasses.replace(
    CONFIG, execution=dataclasses.replace(CONFIG.execution, gradient_dtype="bfloat16")
)
# Neither 3 nor its multiples are divisible by 8.
ADAPTERS = dataclasses.replace(CONFIG, lora=LoraConfig(rank=3))


@functools.cache
def batches():
    """Documents of uneven lengths; the last rows are padding, so that devices have unequal shares."""
    random, examples = np.random.default_rng(0), []
    for _ in range(STEPS):
        tokens_BT = random.integers(1, SMALL.vocab_size, (ROWS, TIME))
        tokens_BT[np.arange(ROWS)[:, None] * TIME + np.arange(TIME) >= 200] = PADDING
        examples.append(make_example(tokens_BT, delimiters=DocumentDelimiters(bos_id=1, eos_id=-1, pad_id=0)))
    return examples


class Run:
    """Training steps of a config on some devices."""

    def __init__(self, devices, num_microbatches=1, config=CONFIG):
        self.config = config
        self.mesh = data_mesh(devices, node_devices=config.execution.node_devices)
        self.setup = make_setup(config, self.mesh.size)
        self.abstract = abstract_state(config, self.setup, self.mesh)
        self.step = compiled_step(
            self.abstract, setup=self.setup, mesh=self.mesh, num_microbatches=num_microbatches
        )

    def start(self):
        init = functools.partial(init_state, self.config, self.setup)
        return jax.jit(init, out_shardings=shardings(self.abstract, self.mesh))()

    def go(self, state, examples, after_step=None):
        history = []
        for batch in examples:
            state, metrics = self.step(state, jax.device_put(batch, sharded(self.mesh)))
            history.append(jax.device_get(metrics))
            if after_step is not None:
                after_step(state)
        return state, jax.tree.map(lambda *values: np.stack(values), *history)

    def program(self):
        """The lowered step."""
        rows = sharded(self.mesh)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=rows), batches()[0])
        return self.step.lower(self.abstract, batch)

    def saved_shape(self, written):
        """Returns shapes of a checkpoint of other devices, with shardings for these devices."""
        saved = jax.eval_shape(to_checkpoint, written.abstract)
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
            saved,
            checkpoint_shardings(saved, self.mesh),
        )


def save_and_restore(state, written, to):
    """Moves a state to other devices through a checkpoint on disk."""
    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
            checkpoints.save(HALF, **jax.jit(to_checkpoint)(state))
        shapes = to.saved_shape(written)
        average = restore_average(folder, HALF, shapes.pop("ema"))
        weights, training = restore(folder, HALF, **shapes)
    partition = functools.partial(from_checkpoint, like=to.abstract, written=written.abstract)
    restored = {"weights": weights, "training": training, "ema": average}
    return jax.jit(partition, out_shardings=shardings(to.abstract, to.mesh))(restored)


def difference(ours, theirs):
    """Returns the maximum relative difference in norm over all leaves."""
    pairs = zip(*(jax.tree.leaves(jax.device_get(tree)) for tree in (ours, theirs)), strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)


class Average:
    """The moving average of a run's weights in float64."""

    def __init__(self, state):
        self.mean, self.num_updates = self.weights(state), 0

    def weights(self, state):
        return jax.tree.map(np.float64, whole_params(state))

    def update(self, state):
        self.num_updates += 1
        decay = min(CONFIG.ema.decay, (1 + self.num_updates) / (10 + self.num_updates))
        self.mean = jax.tree.map(lambda m, w: decay * m + (1 - decay) * w, self.mean, self.weights(state))

    def error(self, state):
        """Returns the maximum error of a state's average, in units of the largest weight of its array."""
        errors = jax.tree.map(
            lambda ours, exact: float(np.abs(ours - exact).max() / max(np.abs(exact).max(), 1e-3)),
            whole_params(state.averaged),
            self.mean,
        )
        return max(jax.tree.leaves(errors))


def compare():
    """Eight devices and one train all steps."""
    devices = jax.devices()
    one, eight = Run(devices[:1]), Run(devices, num_microbatches=2)
    first = whole_params(one.start())
    of_one, of_eight = Average(one.start()), Average(eight.start())
    one_state, one_metrics = one.go(one.start(), batches(), of_one.update)
    eight_state, eight_metrics = eight.go(eight.start(), batches(), of_eight.update)
    names = ("loss", "gradient_norm", "gradient_norms", "update_norms", "router_counts_LX")
    one_params, eight_params = whole_params(one_state), whole_params(eight_state)
    return {
        "devices": len(devices),
        "eight and one": {
            **{n: difference(getattr(eight_metrics, n), getattr(one_metrics, n)) for n in names},
            "weights": difference(eight_params, one_params),
            "router_bias": difference(eight_state.router_bias_LX, one_state.router_bias_LX),
        },
        "averages": {
            "one": of_one.error(one_state),
            "eight": of_eight.error(eight_state),
            "eight and one": difference(whole_params(eight_state.averaged), whole_params(one_state.averaged)),
            "average and weights": difference(whole_params(one_state.averaged), one_params),
        },
        "moved": difference(one_params, first),
        "tokens": one_metrics.router_counts_LX.sum(axis=(1, 2)).tolist(),
    }


def resume():
    """Two devices train the second half from the checkpoint of eight."""
    devices = jax.devices()
    eight, two = Run(devices, num_microbatches=2), Run(devices[:2])
    middle, _ = eight.go(eight.start(), batches()[:HALF])
    resumed = save_and_restore(middle, eight, two)
    eight_state, late = eight.go(middle, batches()[HALF:])
    two_state, metrics = two.go(resumed, batches()[HALF:])
    return {
        "loss": difference(metrics.loss, late.loss),
        "weights": difference(whole_params(two_state), whole_params(eight_state)),
        "averages": difference(whole_params(two_state.averaged), whole_params(eight_state.averaged)),
    }


def adapters_of_experts():
    """Adapters of experts that nodes of four share, compared with one device and eight that share none."""
    lora = LoraConfig(rank=3, targets=("layers/experts/*", "layers/attention/q_proj"))

    def run(devices, count=1):
        execution = dataclasses.replace(CONFIG.execution, node_devices=count)
        actual = Run(devices, config=dataclasses.replace(CONFIG, lora=lora, execution=execution))
        return whole_params(actual.go(actual.start(), batches()[:HALF])[0])["adapters"]

    one, plain, shared = run(jax.devices()[:1]), run(jax.devices()), run(jax.devices(), 4)
    return {"shared": difference(shared, one), "plain": difference(plain, one)}


def adapters():
    """Eight devices and one train adapters; one trains the second half from the eight's checkpoint."""
    steps = batches()
    one, eight = Run(jax.devices()[:1], config=ADAPTERS), Run(jax.devices(), config=ADAPTERS)
    one_state, _ = one.go(one.start(), steps)
    middle, _ = eight.go(eight.start(), steps[:HALF])
    resumed, _ = one.go(save_and_restore(middle, eight, one), steps[HALF:])
    eight_state, _ = eight.go(middle, steps[HALF:])
    # Eight devices initialize their own weights, which may be rounded differently.
    first, of_eight = (whole_params(run.start()) for run in (one, eight))
    states = [whole_params(state) for state in (one_state, eight_state, resumed)]
    trained = [params.pop("adapters") for params in (first, *states)]
    del of_eight["adapters"]
    text = eight.program().compile().as_text()
    buckets = eight.setup.partition.buckets
    return {
        "moved": difference(trained[1]["attention"]["q_proj"]["a"], trained[0]["attention"]["q_proj"]["a"]),
        "eight and one": difference(trained[2], trained[1]),
        "resumed on one": difference(trained[3], trained[2]),
        "frozen moved": max(map(difference, states, (first, of_eight, of_eight))),
        "reduced": sorted(8 * size for size in hlo.collectives(text)["reduce-scatter"]),
        "trained": sorted(math.prod(bucket.shape) for bucket in buckets),
        "frozen held": sum(x.addressable_shards[0].data.size for x in eight_state.frozen.values()),
        "frozen": sum(each.size for each in eight.setup.partition.frozen),
    }


def in_nodes(count, *, num_microbatches=1, **execution):
    """Trains with eight devices in nodes of a given size, which share the 3 experts of a layer: some store
    none.

    With one microbatch the experts arrive layer by layer, with two all at once; no matrix has rows for all
    nodes.
    """
    execution = dataclasses.replace(CONFIG.execution, node_devices=count, **execution)
    config = dataclasses.replace(CONFIG, execution=execution)
    return Run(jax.devices(), num_microbatches=num_microbatches, config=config)


def nodes(*layouts):
    """Nodes of some numbers of devices, compared with devices that share no experts.

    Args:
      layouts: number of devices, of microbatches and a remat policy of each, such as "4,1,products".
    """
    steps = batches()[:3]
    plain_state, plain = Run(jax.devices()).go(Run(jax.devices()).start(), steps)
    actual = {}
    for layout in layouts:
        count, microbatches, remat = layout.split(",")
        run = in_nodes(int(count), num_microbatches=int(microbatches), remat=remat)
        state, metrics = run.go(run.start(), steps)
        names = ("loss", "gradient_norms", "update_norms", "router_counts_LX")
        actual[f"nodes of {count}, {microbatches}"] = {
            **{name: difference(getattr(metrics, name), getattr(plain, name)) for name in names},
            "weights": difference(whole_params(state), whole_params(plain_state)),
        }
    return actual


def across_nodes():
    """A checkpoint of nodes of four is resumed on plain devices, and vice versa."""
    plain, in_node, steps = Run(jax.devices()), in_nodes(4, remat="layer"), batches()
    whole, _ = plain.go(plain.start(), steps)
    actual = {}
    for name, first, then in (("to nodes", plain, in_node), ("from nodes", in_node, plain)):
        middle, _ = first.go(first.start(), steps[:HALF])
        state, _ = then.go(save_and_restore(middle, first, then), steps[HALF:])
        actual[name] = difference(whole_params(state), whole_params(whole))
    return actual


def switches():
    """NorMuon, hyperball and cautious decay on one device, on eight, and in nodes of four from the checkpoint
    of the eight; eight finish from the checkpoint of the nodes.
    """
    optimizer = dataclasses.replace(CONFIG.optimizer, normuon=True, hyperball=True, cautious_decay=True)
    config = dataclasses.replace(CONFIG, optimizer=optimizer)
    in_nodes_of_four = dataclasses.replace(config.execution, node_devices=4)
    one, eight = Run(jax.devices()[:1], config=config), Run(jax.devices(), config=config)
    nodes = Run(jax.devices(), config=dataclasses.replace(config, execution=in_nodes_of_four))
    thirds = batches()[:4], batches()[4:8], batches()[8:]
    states = [run.start() for run in (one, eight, nodes)]
    first = whole_params(states[0])
    for steps in thirds:
        states[0], _ = one.go(states[0], steps)
        states[2], _ = nodes.go(states[2], steps)
    state, _ = eight.go(states[1], thirds[0])
    state, _ = nodes.go(save_and_restore(state, eight, nodes), thirds[1])
    state, _ = eight.go(save_and_restore(state, nodes, eight), thirds[2])
    of_one, of_nodes, moved = map(whole_params, (states[0], states[2], state))
    norms = [np.linalg.norm(x["layers"]["experts"]["down_proj"], axis=(2, 3)) for x in (first, of_one, moved)]
    return {
        "nodes": difference(of_nodes, of_one),
        "moved between them": difference(moved, of_one),
        "norms": max(difference(norm, norms[0]) for norm in norms[1:]),
        "trained": difference(of_one["layers"]["experts"], first["layers"]["experts"]),
    }


def inspect():
    """Communication and products of the compiled step of eight devices, compared with the plan."""
    run = Run(jax.devices())
    partition, alone = run.setup.partition, make_setup(CONFIG, 1).partition
    text = run.program().compile().as_text()
    return {
        "collectives": hlo.collectives(text),
        "bucket_sizes": sorted(math.prod(bucket.shape) for bucket in partition.buckets),
        "newton_schulz_flops": hlo.matrix_product_flops(text, scope="newton_schulz"),
        "planned_flops": optimizer_flops(partition, num_steps=5),
        "replicated_flops": optimizer_flops(alone, num_steps=5),
        "matrices": sum(part.num_matrices for part in alone.stacks),
        "gradients": scattered_types(run),
        "gradients, bfloat16": scattered_types(Run(jax.devices(), config=IN_BFLOAT16)),
        "buckets": len(partition.buckets),
    }


def scattered_types(run):
    """Returns the types of the elements that reduce-scatters add, from StableHLO.

    XLA's CPU backend has no bfloat16 sum and replaces it by a float32 one.
    """
    text = run.program().as_text()
    results = re.findall(r"stablehlo.reduce_scatter.*?-> tensor<([^>]*)>", text, flags=re.DOTALL)
    return collections.Counter(shape.split("x")[-1] for shape in results)


PROGRAMS = {
    each.__name__: each
    for each in (compare, resume, inspect, adapters, adapters_of_experts, nodes, across_nodes, switches)
}

if __name__ == "__main__":
    print(json.dumps(PROGRAMS[sys.argv[1]](*sys.argv[2:])))
