"""Reads the weights of a state of eight devices outside `jax.jit`: values, and number of programs."""

import json

import jax
import numpy as np

from zaya_jax.config import Config
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.weights import initialize
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.step.state import init_state, make_setup, shardings

_MODEL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_experts": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "router_hidden_size": 8,
}
_COMPILED = "/jax/core/compile/backend_compile_duration"


def _read(config: Config) -> dict[str, object]:
    """Reads each property three times without waiting between; JAX itself counts compiled programs."""
    node_devices = config.execution.node_devices
    mesh, setup = data_mesh(node_devices=node_devices), make_setup(config, 8)
    placed = shardings(jax.eval_shape(lambda: init_state(config, setup)), mesh)
    state = jax.jit(lambda: init_state(config, setup), out_shardings=placed)()
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration_secs, **_: compiled.append(duration_secs) if event == _COMPILED else None
    )
    params = [state.params for _ in range(3)]
    num_of_params = len(compiled)
    variables = [state.variables for _ in range(3)]
    num_of_both = len(compiled)
    jax.monitoring.clear_event_listeners()
    # The initial weights, on one device.
    init_key, _ = jax.random.split(jax.random.key(config.train.seed))
    expected = jax.device_get(jax.jit(lambda key: initialize(declare_run(config), key))(init_key))
    read = jax.device_get([*params, *(each["params"] for each in variables)])
    return {
        "programs": [num_of_params, num_of_both],
        "error": max(_largest_difference(each, expected) for each in read),
    }


def _largest_difference(ours: dict, theirs: dict) -> float:
    return max(float(np.abs(x).max()) for x in jax.tree.leaves(jax.tree.map(np.subtract, ours, theirs)))


def main() -> None:
    """Prints the results for one node of eight devices, and two nodes of four."""
    cases = {
        "8 share": {"execution": {"node_devices": 8}},
        "frozen, 4 share": {"optimizer": {"frozen": ["layers/experts/*"]}, "execution": {"node_devices": 4}},
    }
    print(
        json.dumps({name: _read(Config.from_dict({"model": _MODEL} | case)) for name, case in cases.items()})
    )


if __name__ == "__main__":
    main()
