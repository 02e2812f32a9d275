"""Trains the same steps on eight devices and on one, and prints how far apart they end, as JSON.

A program, not a test: the number of devices is fixed when jax starts. `test_multidevice.py` runs it.
"""

import json

import jax
import numpy as np

from zaya_jax.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from zaya_jax.data.batch import make_example
from zaya_jax.parallel.mesh import by_rows, data_mesh
from zaya_jax.train.state import init_state, make_rules, shardings
from zaya_jax.train.step import compiled_step

STEPS, ROWS, TIME, VOCABULARY = 5, 16, 16, 43
CONFIG = Config(
    model=ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=24,
        num_experts=4,
        router_hidden_size=16,
        initializer_range=0.3,
        max_position_embeddings=64,
        dtype="float32",
    ),
    data=DataConfig(sequence_length=TIME, batch_size=ROWS),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0),
    train=TrainConfig(num_steps=STEPS),
)


def batches():
    """Documents of uneven lengths; the last rows are padding, so that devices have unequal shares."""
    random = np.random.default_rng(0)
    for _ in range(STEPS):
        tokens_BT = random.integers(1, VOCABULARY, (ROWS, TIME))
        tokens_BT[np.arange(ROWS)[:, None] * TIME + np.arange(TIME) >= 200] = 0
        yield make_example(tokens_BT, bos_id=1, pad_id=0)


def run(devices, num_microbatches):
    """Losses and router counts of every step, and the state at the end."""
    mesh = data_mesh(devices)
    rules = make_rules(CONFIG, mesh.size)
    state = init_state(CONFIG, rules)
    state, history = jax.device_put(state, shardings(state, mesh)), []
    step = compiled_step(state, rules=rules, mesh=mesh, num_microbatches=num_microbatches)
    for batch in batches():
        state, metrics = step(state, jax.device_put(batch, by_rows(mesh)))
        history.append(jax.device_get(metrics))
    stacked = jax.tree.map(lambda *values: np.stack(values), *history)
    return stacked, jax.device_get(state)


def relative(ours, theirs):
    """The largest relative difference in norm of any leaf."""
    pairs = zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True)
    return max(float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-30)) for a, b in pairs)


def main():
    """Runs both, compares, prints."""
    devices = jax.devices()
    one, one_state = run(devices[:1], 1)
    eight, eight_state = run(devices, 2)
    print(
        json.dumps(
            {
                "devices": len(devices),
                "losses": relative(eight.loss, one.loss),
                "gradient_norms": relative(eight.gradient_norm, one.gradient_norm),
                "weights": relative(eight_state.params, one_state.params),
                "router_counts": relative(eight.router_counts_LX, one.router_counts_LX),
                "router_biases": relative(eight_state.router_bias_LX, one_state.router_bias_LX),
                "moved": relative(one_state.params, init_state(CONFIG, make_rules(CONFIG)).params),
                "tokens": one.router_counts_LX.sum(axis=(1, 2)).tolist(),
            }
        )
    )


if __name__ == "__main__":
    main()
