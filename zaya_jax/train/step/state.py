"""The training state: everything that a step changes and a checkpoint contains."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import unflatten_dict
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zaya_jax.config import Config, DistillationConfig, DpoConfig, EmaConfig
from zaya_jax.errors import UserError
from zaya_jax.model.adapters import declare_run, magnitudes, merged
from zaya_jax.model.frozen_base import stored
from zaya_jax.model.weights import EXPERTS, initialize
from zaya_jax.model.zaya import Zaya, initial_router_bias
from zaya_jax.optim.averaging import WeightAverage, start_average
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.buckets import from_buckets, to_buckets
from zaya_jax.optim.normuon import from_elements, to_elements
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import Partition, make_partition
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.parallel.even_sharding import evenly_sharded, evenly_sharded_by_node, meshes_with_copies
from zaya_jax.parallel.mesh import (
    REPLICATED,
    SHARDED,
    check_node_devices,
    named_shardings,
)
from zaya_jax.pytree import abstract, pytree, static
from zaya_jax.train.implementations import resolve_implementations
from zaya_jax.train.step.integrity import Integrity, no_checksums


@pytree
class TrainState:
    """The state of a run.

    Attributes:
      step: number of completed optimizer steps, including skipped ones; also the position in the data.
      buckets: trained weights in float32, partitioned: each device has its shard of the first axis.
      frozen: other weights, partitioned likewise, in the types that their declarations name.
      router_bias_LX: balancing biases of the routers, shape [L, X].
      optimizer: optimizer state, sharded like the buckets.
      balancer: state of the controller of the router biases.
      key: random key of the run after initialization; samples are drawn from it and the step.
      skipped_steps: number of steps whose loss or gradients were not finite, so that they changed nothing.
      partition: layout of the weights in buckets.
      ema: average of the weights, sharded like the buckets; None if `ema.decay` is 0.
      integrity: checksums of what each device owns; None unless `watch.checksums`.
    """

    step: Int[Array, ""]
    # The only float32 copy: a step casts its shard before it gathers, which halves the bytes on the network.
    buckets: dict[str, Array]
    frozen: dict[str, Array]
    # Not a weight: it has no gradient, and its float32 is never rounded ([ZAYA1-8B] II-A-2).
    router_bias_LX: Float[Array, "L X"]
    optimizer: Any
    balancer: Any
    key: Array
    skipped_steps: Int[Array, ""]
    partition: Partition = static()
    # None is a tree without leaves: without an average, programs and checkpoints have nothing of it.
    ema: WeightAverage | None = None
    # Not in checkpoints, which have their own hashes: `sealed` computes it for a created or restored state.
    integrity: Integrity | None = None

    @property
    def averaged(self) -> "TrainState":
        """The state with the average instead of the weights, for evaluation."""
        assert self.ema is not None, "the run has no average"
        # With the average itself, so that a program that is compiled for the state also evaluates this one.
        return dataclasses.replace(self, buckets=self.ema.buckets, router_bias_LX=self.ema.router_bias_LX)

    @property
    def params(self) -> dict:
        """Weights as `zaya_jax.model.adapters.declare_run` declares them, float32 if they train."""
        return _in_one_program(_read_params, self.partition, self.buckets | self.frozen)

    @property
    def variables(self) -> dict:
        """Variables for `Zaya.apply`, from all devices; adapters are merged into their weights."""
        return self.stored | {
            "params": _in_one_program(_read_merged, self.partition, self.buckets | self.frozen)
        }

    @property
    def stored(self) -> dict:
        """Weights as a checkpoint stores them: adapters separate from the weights that they change."""
        return {"params": self.params, "router_bias": {"layers": self.router_bias_LX}}


_Read = Callable[[Partition, Mapping[str, Array]], dict]
"""Function that reads weights from buckets."""


def _read_params(partition: Partition, buckets: Mapping[str, Array]) -> dict:
    return from_buckets(partition, buckets)


def _read_merged(partition: Partition, buckets: Mapping[str, Array]) -> dict:
    return merged(dict(partition.weights), from_buckets(partition, buckets))


_PROGRAMS: dict[_Read, _Read] = {
    read: jax.jit(read, static_argnums=0) for read in (_read_params, _read_merged)
}


def _in_one_program(read: _Read, partition: Partition, buckets: Mapping[str, Array]) -> dict:
    """Reads weights from sharded buckets; outside `jax.jit` in one program, whose end it waits for.

    Without `jax.jit` each collective operation would be a separate program. Several of them run at once, and
    on a CPU they share one pool of threads: each can hold threads that another one's devices need, until XLA
    ends the process.

    Args:
      read: function that reads weights; `_PROGRAMS` has its compiled form.
      partition: layout of the weights in buckets.
      buckets: buckets of all weights by name.
    """
    # While a program is being traced, the weights become a part of that program.
    if any(isinstance(bucket, Tracer) for bucket in buckets.values()):
        return read(partition, buckets)
    # Two of these programs at once would share the threads as well.
    return jax.block_until_ready(_PROGRAMS[read](partition, buckets))


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """Network, optimizer and loss settings of a training step. Hashable.

    Attributes:
      model: network, with the implementation of every operation.
      partition: layout of its weights on devices.
      optimizer: maps clipped gradients of a device's buckets to updates.
      balancer: maps token counts of a batch to updates of the router biases.
      clip_norm: maximum of the global gradient norm.
      z_loss: weight of the squared logsumexp.
      update_norms: whether the metrics include norms of updates.
      dpo: preference loss; its beta of 0 selects the next-token loss.
      distillation: distillation loss; a teacher of None selects the next-token loss.
      ema: decay of the average of weights; 0 disables it.
      checksums: whether steps compare checksums of what each device owns.
      replay: whether steps can be repeated: their states are not donated, and gradients have checksums.
    """

    model: Zaya
    partition: Partition
    optimizer: optax.GradientTransformation
    balancer: optax.GradientTransformation
    clip_norm: float = float("inf")
    z_loss: float = 0.0
    update_norms: bool = True
    dpo: DpoConfig = dataclasses.field(default_factory=DpoConfig)
    distillation: DistillationConfig = dataclasses.field(default_factory=DistillationConfig)
    ema: EmaConfig = dataclasses.field(default_factory=EmaConfig)
    checksums: bool = False
    replay: bool = False


def make_setup(
    config: Config,
    num_devices: int = 1,
    schedule: optax.Schedule | None = None,
    *,
    platform: str | None = None,
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] | None = None,
) -> TrainSetup:
    """Makes the setup that a config describes.

    Args:
      config: config of a run without phases, or of one phase.
      num_devices: number of devices that the weights are partitioned among.
      schedule: learning rate over the steps of the whole run; None for the config's own.
      platform: platform that the step is compiled for, as for `pallas_kernels.choice.choose`.
      optimizer: returns a custom optimizer from the learning-rate schedule (`Extensions.optimizer`).
    """
    # Resolved here: two setups that compile to different programs must not be equal.
    execution = resolve_implementations(config.execution, config.model, platform=platform)
    node_devices = config.execution.node_devices
    check_node_devices(num_devices, config.execution.context_devices, node_devices)
    # AdamW is elementwise and can update any part of a weight; Muon needs whole matrices.
    by_matrix = config.optimizer.name == "muon"
    declared = declare_run(config)
    partition = make_partition(declared, num_devices, node_devices=node_devices, by_matrix=by_matrix)
    schedule = learning_rate_schedule(config) if schedule is None else schedule
    # A custom optimizer does not receive the partition: it must not depend on which elements it updates.
    if optimizer is None:
        implementation = execution.newton_schulz_implementation
        transformation = make_optimizer(config.optimizer, partition, schedule, implementation=implementation)
    else:
        _check_custom_optimizer(config)
        transformation = optimizer(schedule)
    return TrainSetup(
        model=Zaya(config.model, execution),
        partition=partition,
        optimizer=transformation,
        balancer=make_balancer(config.balancing),
        clip_norm=config.optimizer.clip_norm,
        z_loss=config.train.z_loss,
        update_norms=config.train.update_norms,
        dpo=config.dpo,
        distillation=config.distillation,
        ema=config.ema,
        checksums=config.watch.checksums,
        replay=config.watch.replay,
    )


def _check_custom_optimizer(config: Config) -> None:
    ratio = config.lora.b_learning_rate_ratio
    if config.lora.rank and ratio != 1:
        raise UserError(
            f"lora.b_learning_rate_ratio is {ratio}, and a custom optimizer has its own learning rates; set "
            "it to 1"
        )


def init_state(config: Config, setup: TrainSetup) -> TrainState:
    """Returns the state before the first step. Its weights depend on the config alone."""
    # Two keys, so that no sample repeats the bits of an initial weight.
    init_key, run_key = jax.random.split(jax.random.key(config.train.seed))
    return first_state(setup, initialize(declare_run(config), init_key), run_key)


def first_state(setup: TrainSetup, params: dict, key: Array) -> TrainState:
    """Returns the state before the first step, with these weights."""
    buckets, frozen = _weight_buckets(setup.partition, params)
    buckets |= _magnitude_buckets(setup.partition, params)
    bias_LX = initial_router_bias(setup.model.config)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        buckets=buckets,
        frozen=frozen,
        router_bias_LX=bias_LX,
        # Initialized from the buckets, moments are sharded like them: no device has all of them ([ZeRO] 5.1).
        optimizer=setup.optimizer.init(buckets),
        balancer=setup.balancer.init(bias_LX),
        key=key,
        skipped_steps=jnp.zeros((), jnp.int32),
        ema=start_average(buckets, bias_LX) if setup.ema.decay else None,
        partition=setup.partition,
    )
    integrity = no_checksums(state, has_gradients=setup.replay) if setup.checksums else None
    return dataclasses.replace(state, integrity=integrity)


def with_variables(state: TrainState, variables: dict) -> TrainState:
    """Replaces weights and router biases. Adapters stay, because weights of other runs have none."""
    params = stored(dict(state.partition.weights), variables["params"])
    fields = _variable_fields(state.partition, variables | {"params": params})
    fields["buckets"] = state.buckets | fields["buckets"] | _magnitude_buckets(state.partition, params)
    return dataclasses.replace(state, ema=_restarted(state, fields), **fields)


def _restarted(state: TrainState, fields: dict[str, Any]) -> WeightAverage | None:
    """Returns an average that starts from new weights, if the state has one."""
    return None if state.ema is None else start_average(fields["buckets"], fields["router_bias_LX"])


def _variable_fields(partition: Partition, variables: dict) -> dict[str, Any]:
    buckets, frozen = _weight_buckets(partition, variables["params"])
    return {"buckets": buckets, "frozen": frozen, "router_bias_LX": variables["router_bias"]["layers"]}


def _magnitude_buckets(partition: Partition, params: dict) -> dict[str, Array]:
    """Returns the buckets of DoRA's norms, which depend on the weights that a run starts from."""
    return to_buckets(partition, unflatten_dict(magnitudes(dict(partition.weights), params), sep="/"))


def _weight_buckets(partition: Partition, params: dict) -> tuple[dict[str, Array], dict[str, Array]]:
    """Returns the buckets of trained weights, and those of frozen weights."""
    buckets = to_buckets(partition, params)
    frozen = {each.name: buckets.pop(each.name) for each in partition.frozen}
    return buckets, frozen


def partition_specs(state: TrainState) -> TrainState:
    """Returns the `PartitionSpec` of each array of a state."""

    layouts = state.partition.layouts

    def of_leaf(path: Any, leaf: Any) -> Any:
        if path[0].name == "integrity":
            return SHARDED
        # Counters of an optimizer are scalars among its buckets, and are replicated.
        if path[0].name not in ("buckets", "frozen", "optimizer", "ema") or not leaf.ndim:
            return REPLICATED
        # Like the biases that they are the average of.
        if getattr(path[-1], "name", None) == "router_bias_LX":
            return REPLICATED
        # Optimizers nest their states in various ways; a bucket's name is a key at some depth.
        names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        return next((layouts[name].spec for name in names if name in layouts), SHARDED)

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns the sharding of each array of a state on a mesh."""
    return named_shardings(partition_specs(state), mesh)


def abstract_state(config: Config, setup: TrainSetup, mesh: Mesh) -> TrainState:
    """Returns shapes, types and shardings of a state, without allocating it."""
    state = jax.eval_shape(lambda: init_state(config, setup))
    return abstract(state, shardings(state, mesh))


def to_checkpoint(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a checkpoint: weights as declared, and the rest of the state as it is.

    The optimizer's buckets are two thirds of a state. Each device writes its own buckets unchanged; a restore
    on another number of devices repartitions them.
    """
    average = {} if state.ema is None else {"ema": average_of(state)}
    return {"weights": state.stored, "training": training_of(state), **average}


def average_of(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a checkpoint's average: the weights that train, named like all weights."""
    assert state.ema is not None, "the run has no average"
    # Frozen weights are their own average: with adapters, a copy of them would be nearly the whole model.
    return {
        "params": _in_one_program(_read_params, state.partition, state.ema.buckets),
        "router_bias": {"layers": state.ema.router_bias_LX},
        "num_updates": state.ema.num_updates,
    }


def training_of(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a checkpoint other than weights, which are the state's own arrays."""
    return {
        "step": state.step,
        "optimizer": state.optimizer,
        "balancer": state.balancer,
        "key": state.key,
        "skipped_steps": state.skipped_steps,
        # They determine the partition, without which the buckets cannot be read.
        "num_devices": np.int32(state.partition.num_devices),
        "node_devices": np.int32(state.partition.node_devices),
    }


def from_checkpoint(saved: dict[str, Any], like: TrainState, written: TrainState) -> TrainState:
    """Makes a state from the arrays of a checkpoint, on possibly other devices.

    Args:
      saved: arrays of the checkpoint.
      like: state on the current devices, which may be abstract.
      written: state on as many devices as wrote the checkpoint, which may be abstract.
    """
    counts = ("num_devices", "node_devices")
    training = {name: value for name, value in saved["training"].items() if name not in counts}
    if written.partition != like.partition:
        training["optimizer"] = _repartitioned(training["optimizer"], written, like)
    variables = _variable_fields(like.partition, saved["weights"])
    # A checkpoint without an average, of a run that had none until now, starts it.
    is_saved = like.ema is not None and "ema" in saved
    ema = _average_from(like, saved["ema"]) if is_saved else _restarted(like, variables)
    integrity = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like.integrity)
    # All fields in one replacement: in between, the state would mix abstract and real arrays.
    return dataclasses.replace(like, ema=ema, integrity=integrity, **variables, **training)


def _average_from(like: TrainState, saved: dict[str, Any]) -> WeightAverage:
    """Makes the average of a state from the arrays of a checkpoint."""
    return WeightAverage(
        buckets=to_buckets(like.partition, saved["params"]),
        router_bias_LX=saved["router_bias"]["layers"],
        num_updates=saved["num_updates"],
    )


def _repartitioned(optimizer: Any, written: TrainState, like: TrainState) -> Any:
    """Moves an optimizer state to the buckets of another number of devices."""
    old, new = ({each.name: each for each in s.partition.buckets} for s in (written, like))

    def whole(buckets: dict) -> dict:
        # Muon's state has masks instead of AdamW's buckets, and vice versa.
        present = {
            name: to_elements(old[name], x)
            for name, x in buckets.items()
            if not isinstance(x, optax.MaskedNode)
        }
        return from_buckets(written.partition, present)

    def refill(buckets: dict, tree: dict) -> dict:
        filled = to_buckets(like.partition, tree)
        # The masks stay.
        return buckets | {
            name: from_elements(new[name], x, buckets[name].shape) for name, x in filled.items()
        }

    return _map_buckets(refill, like, like.optimizer, _map_buckets(whole, written, optimizer))


def checkpoint_shardings(checkpoint: Any, mesh: Mesh, partition: Partition | None = None) -> Any:
    """Returns shardings for a checkpoint's arrays or its weights: a device has as little as possible.

    Args:
      checkpoint: shapes of the arrays.
      mesh: all devices.
      partition: layout of the weights on the devices; None shards each array evenly over all devices.
    """
    experts = {
        tuple(path.split("/")): weight.axes.index(EXPERTS)
        for path, weight in (partition.weights if partition else ())
        if partition is not None and partition.node_devices > 1 and weight.of_experts
    }

    def of_leaf(mesh: Mesh, path: Any, leaf: Any) -> Any:
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        axis = next((axis for weight, axis in experts.items() if names[-len(weight) :] == weight), None)
        if axis is None or names[0] == "training":
            return evenly_sharded(mesh, leaf.shape)
        return evenly_sharded_by_node(mesh, leaf.shape, axis)

    def values_of_device(shardings: Any) -> int:
        pairs = zip(*map(jax.tree.leaves, (checkpoint, shardings)), strict=True)
        return sum(math.prod(sharding.shard_shape(leaf.shape)) for leaf, sharding in pairs)

    # With 768 devices, three copies of each part: they divide no dimension of 2,048, but 256 of them do.
    candidates = (
        jax.tree_util.tree_map_with_path(functools.partial(of_leaf, each), checkpoint)
        for each in meshes_with_copies(mesh)
    )
    return min(candidates, key=values_of_device)


def _map_buckets(function: Any, state: TrainState, *optimizers: Any) -> Any:
    """Maps over the dicts of buckets in optimizer states; other leaves are those of the last state."""
    names = {bucket.name for bucket in state.partition.buckets}

    def is_buckets(node: Any) -> bool:
        # Optax nests its states in various ways; buckets are a dict with exactly these names at any depth.
        return isinstance(node, dict) and set(node) == names

    def visit(*nodes: Any) -> Any:
        return function(*nodes) if is_buckets(nodes[0]) else nodes[-1]

    return jax.tree.map(visit, *optimizers, is_leaf=is_buckets)
