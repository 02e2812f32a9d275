"""Bytes that a run needs on each device, from abstract shapes: nothing is compiled or allocated."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cross_entropy
from pallas_kernels.backend import execute_launches
from zaya_jax.config import Config, ExecutionConfig, ModelConfig
from zaya_jax.config.sections.lora import QUANTIZED
from zaya_jax.model.adapters import declare_run
from zaya_jax.model.remat import REMAT_POLICIES, group_size
from zaya_jax.model.weights import Weight, abstract_variables, declare, flatten_weights, map_weights
from zaya_jax.model.zaya import hidden_states
from zaya_jax.optim.partition import Partition, make_partition
from zaya_jax.parallel.bucket_layouts import BucketLayout
from zaya_jax.parallel.mesh import SUM_DTYPE
from zaya_jax.plan.devices import Cluster
from zaya_jax.plan.shares import keys_bytes, micro_batch, own_tokens
from zaya_jax.train.peer_copies.writer import COPIES_PER_STATE
from zaya_jax.train.step.state import init_state, make_setup

POLICIES = ("none", *REMAT_POLICIES)
"""Values of `ExecutionConfig.remat`, from the most memory to the most recomputation."""

HOST_BANDWIDTH = 63e9
"""Bytes per second from a GPU to its host, one way: 16 lanes of PCIe 5.0, as on the data sheets of all
planned GPUs."""
_PRIMES = (127, 131, 137, 139, 149, 151)
"""Batch sizes for tracing: an array whose size the prime divides has a batch axis."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of the state, weights and gradients on each device.

    State that only the optimizer needs is partitioned over the devices ([ZeRO] section 5.1, stage 1).

    Attributes:
      master: the device's part of the float32 weights that train.
      frozen: the device's part of the weights that do not train, in the types that the state stores them in.
      moments: the device's part of the optimizer state.
      ema: the device's part of the average of the weights; 0 without one.
      weights: weights on the device in the dtype of the products; of experts that a node shares, its own. On
        a single device those that the state already stores so are excluded.
      gradients: gradients of these weights before they are summed over devices; only for trained weights.
      own_gradients: the device's part of the summed gradients, float32.
    """

    master: int
    frozen: int
    moments: int
    ema: int
    weights: int
    gradients: int
    own_gradients: int


def state_bytes(config: Config, num_devices: int) -> StateBytes:
    """Bytes of the state on each device; exact, from the shapes that training creates."""
    # Shapes come from the code that training runs, so that the estimate cannot drift from it.
    state = jax.eval_shape(lambda: init_state(config, make_setup(config, num_devices)))
    declared = partition_of(config, num_devices).own_weights.values()
    # Of a single device, the step reads these from the state itself.
    copied = [w for w in declared if num_devices > 1 or w.trains or not _is_ready(w, config.execution.dtype)]
    return StateBytes(
        master=_bytes(state.buckets) // num_devices,
        frozen=_bytes(state.frozen) // num_devices,
        # The balancer's state is not partitioned: each device has all of it.
        moments=_bytes(state.optimizer) // num_devices + _bytes(state.balancer),
        # The averages of the router biases are on each device, like the biases themselves.
        ema=_bytes(state.ema.buckets) // num_devices + _bytes(state.ema.router_bias_LX) if state.ema else 0,
        weights=sum(weight.size * _item(weight, config.execution.dtype) for weight in copied),
        gradients=sum(
            weight.size * _item(weight, config.execution.gradient_dtype)
            for weight in declared
            if weight.trains
        ),
        own_gradients=_bytes(state.buckets) // num_devices,
    )


def partitioned_bytes(config: Config, num_devices: int, dtype: str, *, frozen: bool = False) -> int:
    """Total bytes of partitioned weights as they are sent; see `bytes_by_bucket`."""
    return sum(bytes_by_bucket(config, num_devices, dtype, frozen=frozen).values())


def bytes_by_bucket(config: Config, num_devices: int, dtype: str, *, frozen: bool = False) -> dict[str, int]:
    """Bytes of each bucket of weights as they are partitioned and sent, including padding.

    A bucket of experts that a node shares counts once per device of the node, because each sends its own.

    Args:
      config: config of the run.
      num_devices: number of devices that share the weights.
      dtype: dtype of weights in products; the others are float32.
      frozen: whether to include weights that do not train, which are gathered but have no gradient.
    """
    partition = partition_of(config, num_devices)
    weights = dict(partition.weights)
    item = jnp.dtype(dtype).itemsize
    flat = (*partition.flat_parameters, *(partition.frozen if frozen else ()))
    return {
        bucket.name: math.prod(bucket.shape)
        # All weights of a matrix bucket are factors of products; a flat bucket is one weight, which may not
        # be.
        * (item if bucket in partition.matrix_buckets else _item(weights[bucket.name], dtype))
        * (partition.node_devices if bucket.layout is BucketLayout.OWN_EXPERTS else 1)
        for bucket in (*partition.matrix_buckets, *flat)
    }


def sum_dtype(config: Config) -> str:
    """The dtype in which gradients are sent: that of their sum, or their own if their owners add them up."""
    return SUM_DTYPE if config.execution.node_devices == 1 else config.execution.gradient_dtype


def summed_bytes(config: Config, num_devices: int) -> int:
    """Bytes of the wider copy of all gradients that is sent; 0 if gradients already have that dtype."""
    # A single device sends nothing.
    if num_devices == 1 or config.execution.gradient_dtype == sum_dtype(config):
        return 0
    return partitioned_bytes(config, num_devices, sum_dtype(config))


def expert_bytes(config: Config) -> int:
    """Bytes of all layers' experts as a node gathers them, including padding; 0 if experts are not shared."""
    count = config.execution.node_devices
    if count == 1:
        return 0
    # Every device of the node stores one part; the gathered experts are all parts.
    own = partition_of(config, count).own_weights.values()
    return count * sum(w.size * _item(w, config.execution.dtype) for w in own if is_gathered(w))


def is_gathered(weight: Weight) -> bool:
    """Whether a node that shares experts gathers this weight in the layers that use it."""
    # An adapter's factors are added to the weight that they change before it is gathered.
    return weight.of_experts and weight.adapts is None


def partition_of(config: Config, num_devices: int) -> Partition:
    """Returns the ZeRO-1 partition of a run over a number of devices."""
    return make_partition(
        declare_run(config),
        num_devices,
        node_devices=config.execution.node_devices,
        by_matrix=config.optimizer.name == "muon",
    )


@functools.cache
def activation_bytes(config: ModelConfig, execution: ExecutionConfig, time: int) -> int:
    """Bytes that the backward pass of all layers keeps for one sequence, under the remat policy of
    `execution`.

    Exact for the traced program: all residuals of the forward pass that grow with the batch. XLA may keep
    less.
    """
    # The prime must not divide any other size, or the array would seem to have a batch axis.
    sizes = [time, *(weight.size for weight in flatten_weights(declare(config)).values())]
    # A prime batch marks its axis: an array has one exactly if its size is a multiple.
    batch = next(prime for prime in _PRIMES if all(size % prime for size in sizes))
    kept = jax.tree.leaves(kept_shapes(config, execution, batch, time))
    return _bytes([x for x in kept if x.size % batch == 0]) // batch


def kept_shapes(config: ModelConfig, execution: ExecutionConfig, batch: int, time: int) -> Any:
    """Shapes of everything that the layers' backward pass keeps from the forward pass, including weights.

    Args:
      config: config of the model.
      execution: how the run is computed.
      batch: number of sequences.
      time: tokens per sequence.
    """
    # XLA's grouped product keeps other residuals on a CPU than on a GPU: trace the latter. A vendor's package
    # may be missing here.
    if execution.implementation_of("experts") not in ("pallas", "ragged_dot+pallas"):
        execution = dataclasses.replace(execution, experts_implementation="ragged_dot")
    variables = abstract_variables(config)
    dtypes = map_weights(
        lambda w, x: jax.ShapeDtypeStruct(x.shape, execution.dtype if w.in_products else x.dtype),
        declare(config),
        variables["params"],
    )
    tokens_BT = jax.ShapeDtypeStruct((batch, time), jnp.int32)

    # The closure of jax.vjp holds exactly the residuals that the backward pass needs.
    def pull_back(params: Any, bias: jax.Array, tokens: jax.Array) -> Any:
        def stream(params: Any) -> Any:
            # Tokens, positions and segments have the same shape and dtype, so that one abstract array stands
            # for all.
            return hidden_states(config, execution, params, bias, tokens, tokens, tokens).x_BTD

        return jax.vjp(stream, params)[1]

    # Tracing kernels would take longer than everything else.
    with execute_launches(_without_kernel):
        return jax.eval_shape(pull_back, dtypes, variables["router_bias"]["layers"], tokens_BT)


def _without_kernel(
    kernel: Callable[..., Any], operands: Sequence[jax.Array], results: Any, name: str
) -> Sequence[jax.Array]:
    """Executor of launches in programs that are traced and never run: results that depend on all operands."""
    del kernel, name
    return jax.pure_callback(_never_called, results, *operands)


def _never_called(*operands: Any) -> Any:
    raise AssertionError("a program without its kernels is only traced")


def working_bytes(config: ModelConfig, execution: ExecutionConfig, time: int) -> int:
    """Temporary bytes of one sequence: one layer whose backward pass runs without recomputation.

    With remat "group" it includes the residual streams before all layers of the current group.
    """
    at_work = _layer_bytes(config, execution, "none", time)
    return at_work + (
        group_size(config.num_hidden_layers) * _layer_bytes(config, execution, "layer", time)
        if execution.remat == "group"
        else 0
    )


def group_bytes(config: Config) -> int:
    """Bytes of the copies of the current group's weights and gradients; 0 without groups."""
    model, execution = config.model, config.execution
    if execution.remat != "group":
        return 0
    layers = flatten_weights({"layers": declare(model)["layers"]}).values()
    both = sum(
        weight.size * (_item(weight, execution.dtype) + _item(weight, execution.gradient_dtype))
        for weight in layers
    )
    # The weights of all layers are stacked, so that every layer has the same share of them.
    return both * group_size(model.num_hidden_layers) // model.num_hidden_layers


def dequantized_bytes(config: Config) -> int:
    """Bytes of one layer's experts in the dtype of products, if the state stores them quantized."""
    if not config.lora.rank or config.lora.base_dtype not in QUANTIZED:
        return 0
    experts = (w for w in flatten_weights(declare(config.model)).values() if w.of_experts)
    # The weights of all layers are stacked.
    return sum(_item(w, config.execution.dtype) * w.size for w in experts) // config.model.num_hidden_layers


def logits_bytes(config: Config, tokens: int) -> int:
    """Bytes of the logits that exist at a time, or their exponentials, and of their gradient."""
    execution, vocabulary = config.execution, config.model.vocab_size
    implementation, item = execution.implementation_of("loss"), jnp.dtype(execution.dtype).itemsize
    if implementation == "pallas":
        return item * tokens * min(cross_entropy.BLOCKS.chunk, vocabulary)
    rows = min(execution.loss_chunk, tokens)
    # XLA keeps float32 logits; the gradient has the dtype of the products that read it.
    return ((item if implementation == "pallas+xla" else 4) + item) * rows * vocabulary


def gathered_expert_bytes(config: Config) -> int:
    """Bytes of gathered experts that exist at a time, and of their gradients; 0 if experts are not shared."""
    all_layers = expert_bytes(config)
    if config.execution.remat == "none":  # the forward pass keeps them for the backward pass
        return all_layers
    # Experts of the current layer, those of the next one in flight, and gradients of the former.
    return 3 * all_layers // config.model.num_hidden_layers


def orthogonalization_bytes(config: Config, num_devices: int) -> int:
    """Bytes of a device's matrices before and after Muon's orthogonalization, float32; 0 for AdamW."""
    if config.optimizer.name != "muon":
        return 0
    num_bytes = bytes_by_bucket(config, num_devices, "float32")
    matrices = partition_of(config, num_devices).matrix_buckets
    return 2 * sum(num_bytes[bucket.name] for bucket in matrices) // num_devices


def own_state_bytes(config: Config, num_devices: int) -> int:
    """Bytes of the part of the state that each device owns."""
    state = state_bytes(config, num_devices)
    return state.master + state.moments + state.ema


@dataclasses.dataclass(frozen=True, kw_only=True)
class PeerCopyCost:
    """Cost of copies of the state in the memory of other nodes (`train.peer_copies_every`).

    Attributes:
      every: steps between two copies; None if the run makes none.
      gpu_bytes: bytes that each GPU copies to its host.
      node_bytes: host memory of a node for its own copies and those of another node, of two steps each.
      buffer_bytes: more host memory of a node while its copies are written.
      host_seconds: time from the GPUs to their host, for which training waits.
      network_seconds: time to the next node, in the background; 0 for a single node.
    """

    every: int | None
    gpu_bytes: int
    node_bytes: int
    buffer_bytes: int
    host_seconds: float
    network_seconds: float


def peer_copy_cost(config: Config, cluster: Cluster) -> PeerCopyCost:
    """Returns the cost of peer copies, which the run need not make."""
    # Without the router biases and counters, a few bytes that each process copies.
    own = own_state_bytes(config, cluster.num_gpus) + state_bytes(config, cluster.num_gpus).frozen
    of_node = own * cluster.gpus_per_node
    is_alone = cluster.nodes == 1
    return PeerCopyCost(
        every=config.train.peer_copies_every,
        gpu_bytes=own,
        node_bytes=of_node * (COPIES_PER_STATE // 2 if is_alone else COPIES_PER_STATE),
        buffer_bytes=of_node,
        host_seconds=own / HOST_BANDWIDTH,
        # Each GPU has its NIC, and the processes of a node send at the same time.
        network_seconds=0.0 if is_alone else own / cluster.device.network_bandwidth,
    )


def memory_by_kind(config: Config, num_devices: int) -> dict[str, int]:
    """Bytes on each device by kind, by arithmetic; the compiler reuses some memory and adds some.

    An implementation that the config does not name is XLA's; see `for_platform`.
    """
    state = state_bytes(config, num_devices)
    time, rows = own_tokens(config), micro_batch(config, num_devices)
    # The gradients of a single microbatch are the sum already.
    accumulated = state.gradients if config.execution.num_microbatches > 1 else 0
    # The residuals of a sequence do not depend on the number of microbatches: one trace serves all of them.
    execution = dataclasses.replace(config.execution, num_microbatches=1)
    activations = rows * activation_bytes(config.model, execution, time)
    working = rows * working_bytes(config.model, execution, time)
    logits = logits_bytes(config, rows * time)
    gathered = gathered_expert_bytes(config)
    keys = rows * keys_bytes(config)
    dequantized = dequantized_bytes(config)
    # Weights and residuals are no longer needed when gradients are sent: their memory is free for the copies,
    # and later for the optimizer.
    free = state.weights + activations + working + logits + keys
    matrices, own_gradients = orthogonalization_bytes(config, num_devices), state.own_gradients
    optimizer = max(matrices - free, 0)
    # Parts of the sum arrive during the backward pass. A single device converts its gradients after it.
    if num_devices == 1:
        own_gradients = max(own_gradients - max(free - matrices, 0), 0)
    return {
        "weights, float32, shard of this device": state.master,
        **({"frozen weights, shard of this device": state.frozen} if state.frozen else {}),
        "optimizer state, shard of this device": state.moments,
        **({"average of the weights, shard of this device": state.ema} if state.ema else {}),
        **(
            {"state before the last step, and a repeated state": 2 * own_state_bytes(config, num_devices)}
            if config.watch.replay
            else {}
        ),
        f"weights, {config.execution.dtype}, full copy": state.weights,
        f"gradients, {config.execution.gradient_dtype}, full copy": state.gradients,
        **({"gradients, shard of this device": own_gradients} if own_gradients else {}),
        "accumulated gradients": accumulated,
        f'activations of {rows * time:,} tokens, remat "{config.execution.remat}"': activations,
        "temporary arrays of a layer": working,
        **({"dequantized experts of a layer": dequantized} if dequantized else {}),
        **({"gathered experts": gathered} if gathered else {}),
        **({"keys and values of shared sequences": keys} if keys else {}),
        "weights and gradients of a group of layers": group_bytes(config),
        "logits of a chunk and their gradient": logits,
        f"communication buffers of gradients, {sum_dtype(config)}": max(
            summed_bytes(config, num_devices) - free, 0
        ),
        **({"matrices in the optimizer": optimizer} if optimizer else {}),
    }


def _layer_bytes(config: ModelConfig, execution: ExecutionConfig, remat: str, time: int) -> int:
    """Bytes that a remat policy keeps per layer and sequence."""
    policy = dataclasses.replace(execution, remat=remat)
    return activation_bytes(config, policy, time) // config.num_hidden_layers


def _item(weight: Weight, dtype: str) -> int:
    # Weights outside of products, such as those of norms, are not cast.
    return jnp.dtype(dtype if weight.in_products else weight.dtype).itemsize


def _is_ready(weight: Weight, dtype: str) -> bool:
    """Whether a step uses a weight as the state stores it."""
    return not weight.in_products or weight.dtype == dtype


def _bytes(tree: object) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
