"""Bytes that a run needs on each device, from abstract shapes: nothing is compiled or allocated."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import Config, ExecutionConfig, ModelConfig
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.remat import REMAT_POLICIES, group_size
from zaya_jax.model.weights import Weight, abstract_variables, declare, flatten_weights, map_weights
from zaya_jax.model.zaya import hidden_states
from zaya_jax.optim.partition import Partition, make_partition
from zaya_jax.parallel.layouts import BucketLayout
from zaya_jax.parallel.mesh import SUM_DTYPE
from zaya_jax.plan.shares import keys_bytes, micro_batch, own_tokens
from zaya_jax.train.state import init_state, make_setup

POLICIES = ("none", *REMAT_POLICIES)
"""What `ExecutionConfig.remat` can be, from the most memory to the most recomputation."""

_PRIMES = (127, 131, 137, 139, 149, 151)
"""Batches to trace with: an array that a prime divides has the batch as an axis."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of what lives from step to step, and of weights and gradients within one; on each device.

    What only an optimiser needs is cut into parts, one a device ([ZeRO] section 5.1, stage 1).

    Attributes:
      master: the device's part of the weights, float32; of those that do not train too.
      moments: its part of the optimiser's state.
      weights: all that the device holds as products take them: of experts that a node shares its own.
      gradients: of these, before they are summed over devices; only what trains has any.
      own_gradients: the device's part of the sums, float32.
    """

    master: int
    moments: int
    weights: int
    gradients: int
    own_gradients: int


def state_bytes(config: Config, num_devices: int) -> StateBytes:
    """Bytes of state on each device; exact, from the shapes that training makes."""
    state = jax.eval_shape(lambda: init_state(config, make_setup(config, num_devices)))
    declared = _partition(config, num_devices).own_weights.values()
    return StateBytes(
        master=_bytes((state.buckets, state.frozen)) // num_devices,
        moments=_bytes(state.optimizer) // num_devices + _bytes(state.balancer),
        weights=sum(weight.size * _item(weight, config.execution.dtype) for weight in declared),
        gradients=sum(
            weight.size * _item(weight, config.execution.gradient_dtype)
            for weight in declared
            if weight.trains
        ),
        own_gradients=_bytes(state.buckets) // num_devices,
    )


def partitioned_bytes(config: Config, num_devices: int, dtype: str, *, frozen: bool = False) -> int:
    """Bytes of weights as they are partitioned and sent, as `bytes_by_bucket` has them, in all."""
    return sum(bytes_by_bucket(config, num_devices, dtype, frozen=frozen).values())


def bytes_by_bucket(config: Config, num_devices: int, dtype: str, *, frozen: bool = False) -> dict[str, int]:
    """Bytes of each bucket of weights as they are partitioned and sent: what does not divide is padded.

    A bucket of experts that a node shares counts as often as there are devices in it, which send it apart.

    Args:
      config: of the run.
      num_devices: that share.
      dtype: of what products take; the rest is float32.
      frozen: also of the weights that do not train, which are gathered and have no gradient.
    """
    partition = _partition(config, num_devices)
    weights = dict(partition.weights)
    item = jnp.dtype(dtype).itemsize
    flat = (*partition.flat_parameters, *(partition.frozen if frozen else ()))
    return {
        bucket.name: math.prod(bucket.shape)
        * (item if bucket in partition.matrix_buckets else _item(weights[bucket.name], dtype))
        * (partition.node_devices if bucket.layout is BucketLayout.OWN_EXPERTS else 1)
        for bucket in (*partition.matrix_buckets, *flat)
    }


def sum_dtype(config: Config) -> str:
    """The type in which gradients travel: that of their sum, or their own where their owners add them up."""
    return SUM_DTYPE if config.execution.node_devices == 1 else config.execution.gradient_dtype


def summed_bytes(config: Config, num_devices: int) -> int:
    """Bytes of the wider copy of all gradients that travels; 0 where they are kept in that type anyway."""
    if num_devices == 1 or config.execution.gradient_dtype == sum_dtype(config):
        return 0
    return partitioned_bytes(config, num_devices, sum_dtype(config))


def expert_bytes(config: Config) -> int:
    """Bytes of all layers' experts as they are gathered in a node, padding included; 0 if they are not."""
    count = config.execution.node_devices
    if count == 1:
        return 0
    own = _partition(config, count).own_weights.values()
    return count * sum(w.size * _item(w, config.execution.dtype) for w in own if _is_gathered(w))


def _is_gathered(weight: Weight) -> bool:
    # An adapter's factors are added to what they change before that is gathered.
    return weight.of_experts and weight.adapts is None


def _partition(config: Config, num_devices: int) -> Partition:
    return make_partition(
        declare_run(config),
        num_devices,
        node_devices=config.execution.node_devices,
        by_matrix=config.optimizer.name == "muon",
    )


@functools.cache
def activation_bytes(config: ModelConfig, execution: ExecutionConfig, time: int) -> int:
    """Bytes that the backward pass of all layers keeps for one sequence, under the execution's remat.

    Exact for the program as JAX writes it down: what the backward pass takes from the forward pass and
    what grows with the batch. XLA may keep less.
    """
    sizes = [time, *(weight.size for weight in flatten_weights(declare(config)).values())]
    batch = next(prime for prime in _PRIMES if all(size % prime for size in sizes))
    kept = jax.tree.leaves(kept_shapes(config, execution, batch, time))
    return _bytes([x for x in kept if x.size % batch == 0]) // batch


def kept_shapes(config: ModelConfig, execution: ExecutionConfig, batch: int, time: int) -> Any:
    """Shapes of all that the backward pass of the layers takes from the forward pass, weights too.

    Args:
      config: of the model.
      execution: of the run.
      batch: sequences.
      time: tokens a sequence.
    """
    # The grouped product of a CPU keeps other things than that of a GPU.
    execution = dataclasses.replace(execution, experts_implementation="ragged_dot")
    variables = abstract_variables(config)
    dtypes = map_weights(
        lambda w, x: jax.ShapeDtypeStruct(x.shape, execution.dtype if w.in_products else x.dtype),
        declare(config),
        variables["params"],
    )
    tokens_BT = jax.ShapeDtypeStruct((batch, time), jnp.int32)

    def pull_back(params: Any, bias: jax.Array, tokens: jax.Array) -> Any:
        def stream(params: Any) -> Any:
            return hidden_states(config, execution, params, bias, tokens, tokens, tokens).x_BTD

        return jax.vjp(stream, params)[1]

    return jax.eval_shape(pull_back, dtypes, variables["router_bias"]["layers"], tokens_BT)


def working_bytes(config: ModelConfig, execution: ExecutionConfig, time: int) -> int:
    """Bytes of one sequence at work: in one layer, while its backward pass runs with nothing recomputed.

    With remat "group" also the streams before all layers of the group that the layer is in.
    """
    at_work = _layer_bytes(config, execution, "none", time)
    return at_work + (
        group_size(config.num_hidden_layers) * _layer_bytes(config, execution, "layer", time)
        if execution.remat == "group"
        else 0
    )


def group_bytes(config: Config) -> int:
    """Bytes of the weights and gradients of the group at work, which are copies; 0 without groups."""
    model, execution = config.model, config.execution
    if execution.remat != "group":
        return 0
    layers = flatten_weights({"layers": declare(model)["layers"]}).values()
    both = sum(
        weight.size * (_item(weight, execution.dtype) + _item(weight, execution.gradient_dtype))
        for weight in layers
    )
    return both * group_size(model.num_hidden_layers) // model.num_hidden_layers


def logits_bytes(config: Config, tokens: int) -> int:
    """Bytes of the logits that exist at a time, and of their gradient; float32."""
    return 2 * 4 * min(config.execution.loss_chunk, tokens) * config.model.vocab_size


def memory_by_kind(config: Config, num_devices: int) -> dict[str, int]:
    """Bytes on each device, by kind. Arithmetic: the compiler reuses some and adds some."""
    state = state_bytes(config, num_devices)
    time, rows = own_tokens(config), micro_batch(config, num_devices)
    accumulated = state.gradients if config.execution.num_microbatches > 1 else 0
    activations = rows * activation_bytes(config.model, config.execution, time)
    working = rows * working_bytes(config.model, config.execution, time)
    logits = logits_bytes(config, rows * time)
    # Those at work, the next ones on their way, and gradients of the former.
    gathered = 3 * expert_bytes(config) // config.model.num_hidden_layers
    keys = rows * keys_bytes(config)
    # The weights and all that the backward pass keeps have served when the gradients travel.
    free = state.weights + activations + working + logits + keys
    return {
        "weights, float32, own part": state.master,
        "optimiser state, own part": state.moments,
        f"weights, {config.execution.dtype}, all": state.weights,
        f"gradients, {config.execution.gradient_dtype}, all": state.gradients,
        "gradients, own part": state.own_gradients,
        "gradients, accumulated": accumulated,
        f'activations of {rows * time:,} tokens, remat "{config.execution.remat}"': activations,
        "at work on a layer": working,
        **({"experts of a layer, gathered": gathered} if gathered else {}),
        **({"keys and values of shared sequences": keys} if keys else {}),
        "weights and gradients of a group of layers": group_bytes(config),
        "logits of a chunk and their gradient": logits,
        f"gradients, {sum_dtype(config)}, on their way, beyond what is free": max(
            summed_bytes(config, num_devices) - free, 0
        ),
    }


def _layer_bytes(config: ModelConfig, execution: ExecutionConfig, remat: str, time: int) -> int:
    """Bytes that a policy keeps of one layer and one sequence."""
    policy = dataclasses.replace(execution, remat=remat)
    return activation_bytes(config, policy, time) // config.num_hidden_layers


def _item(weight: Weight, dtype: str) -> int:
    return jnp.dtype(dtype).itemsize if weight.in_products else 4


def _bytes(tree: object) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
