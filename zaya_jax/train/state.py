"""Everything that a training step changes, and all that a checkpoint must hold."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zaya_jax.config import Config
from zaya_jax.model.adapters import declare_run, merged
from zaya_jax.model.weights import EXPERTS, initialise
from zaya_jax.model.zaya import Zaya, initial_router_bias
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.buckets import from_buckets, to_buckets
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.partition import Partition, make_partition
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.parallel.mesh import (
    REPLICATED,
    SHARDED,
    check_node_devices,
    evenly_sharded,
    evenly_sharded_by_node,
    named_shardings,
)
from zaya_jax.pytree import abstract, pytree, static
from zaya_jax.train.implementations import resolve_implementations


@pytree
class TrainState:
    """The state of a run. Its step is also the position in the data."""

    step: Int[Array, ""]
    """Optimiser steps done, skipped ones included."""
    # The only float32 copy: a step casts its shard before it gathers, so that half the bytes travel.
    buckets: dict[str, Array]
    """The weights that train, in float32, partitioned: each device has its shard of the first axis."""
    frozen: dict[str, Array]
    """The others, likewise: nothing moves them."""
    # Outside the weights: no gradient moves it, and its float32 is never rounded ([ZAYA1-8B] II-A-2).
    router_bias_LX: Float[Array, "L X"]
    optimizer: Any
    """Of the buckets, and sharded with them."""
    balancer: Any
    """Of the router biases."""
    key: Array
    """The run's randomness after initialisation: samples are drawn from it and the step."""
    skipped_steps: Int[Array, ""]
    """Steps whose loss or gradients were not finite, and which therefore changed nothing."""
    partition: Partition = static()
    """How weights make buckets."""

    @property
    def params(self) -> dict:
        """The weights as `zaya_jax.model.adapters.declare_run` declares them, in float32."""
        return from_buckets(self.partition, self.buckets | self.frozen)

    @property
    def variables(self) -> dict:
        """What `Zaya.apply` takes, of all devices together: adapters are merged into what they change."""
        return self.stored | {"params": merged(dict(self.partition.weights), self.params)}

    @property
    def stored(self) -> dict:
        """What a checkpoint holds of the weights: adapters beside what they change."""
        return {"params": self.params, "router_bias": {"layers": self.router_bias_LX}}


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """What moves a state. Hashable.

    Attributes:
      model: the network, and how it and its loss are computed, with every implementation named.
      partition: of its weights to devices.
      optimizer: from clipped gradients of a device's buckets to their updates.
      balancer: from a batch's counts of tokens to updates of the router's biases.
      clip_norm: the global gradient norm is scaled down to this.
      z_loss: weight of the squared logsumexp.
      update_norms: whether a step tells the norms of updates.
      dpo_beta: of the loss of pairs of answers; 0 for that of the next token.
    """

    model: Zaya
    partition: Partition
    optimizer: optax.GradientTransformation
    balancer: optax.GradientTransformation
    clip_norm: float = float("inf")
    z_loss: float = 0.0
    update_norms: bool = True
    dpo_beta: float = 0.0


def make_setup(
    config: Config,
    num_devices: int = 1,
    schedule: optax.Schedule | None = None,
    *,
    platform: str | None = None,
    optimizer: Callable[[optax.Schedule], optax.GradientTransformation] | None = None,
) -> TrainSetup:
    """The setup that a config describes.

    Args:
      config: of a run without phases, or of one phase.
      num_devices: that the weights are partitioned among.
      schedule: the learning rate over the steps of the whole run; None for the config's own.
      platform: that the step is compiled for, as `pallas_kernels.choice.choose` takes it.
      optimizer: makes another one than the config's, as `Extensions` has it.
    """
    # Named here, once: two setups that compile to different programs must not be equal.
    execution = resolve_implementations(config.execution, config.model, platform=platform)
    node_devices = config.execution.node_devices
    check_node_devices(num_devices, config.execution.context_devices, node_devices)
    # Elementwise, AdamW can move any cut of a weight; only Muon needs its matrices whole.
    by_matrix = config.optimizer.name == "muon"
    declared = declare_run(config)
    partition = make_partition(declared, num_devices, node_devices=node_devices, by_matrix=by_matrix)
    schedule = learning_rate_schedule(config) if schedule is None else schedule
    # One's own is given no partition: it must not care which elements it is given.
    if optimizer is None:
        implementation = execution.newton_schulz_implementation
        moves = make_optimizer(config.optimizer, partition, schedule, implementation=implementation)
    else:
        moves = optimizer(schedule)
    return TrainSetup(
        model=Zaya(config.model, execution),
        partition=partition,
        optimizer=moves,
        balancer=make_balancer(config.balancing),
        clip_norm=config.optimizer.clip_norm,
        z_loss=config.train.z_loss,
        update_norms=config.train.update_norms,
        dpo_beta=config.dpo.beta,
    )


def init_state(config: Config, setup: TrainSetup) -> TrainState:
    """The state before the first step. Its weights depend on the config alone."""
    # A run samples from a key of its own, so that no draw repeats the bits of an initial weight.
    init_key, run_key = jax.random.split(jax.random.key(config.train.seed))
    return first_state(setup, initialise(declare_run(config), init_key), run_key)


def first_state(setup: TrainSetup, params: dict, key: Array) -> TrainState:
    """The state before the first step, of given weights."""
    buckets, frozen = _weight_buckets(setup.partition, params)
    bias_LX = initial_router_bias(setup.model.config)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        buckets=buckets,
        frozen=frozen,
        router_bias_LX=bias_LX,
        # Born of the buckets, moments lie as they do: no device ever has them whole ([ZeRO] 5.1).
        optimizer=setup.optimizer.init(buckets),
        balancer=setup.balancer.init(bias_LX),
        key=key,
        skipped_steps=jnp.zeros((), jnp.int32),
        partition=setup.partition,
    )


def with_variables(state: TrainState, variables: dict) -> TrainState:
    """The state with other weights and router biases; adapters stay, for the weights of others have none."""
    fields = _variable_fields(state.partition, variables)
    return dataclasses.replace(state, **fields | {"buckets": state.buckets | fields["buckets"]})


def _variable_fields(partition: Partition, variables: dict) -> dict[str, Any]:
    buckets, frozen = _weight_buckets(partition, variables["params"])
    return {"buckets": buckets, "frozen": frozen, "router_bias_LX": variables["router_bias"]["layers"]}


def _weight_buckets(partition: Partition, params: dict) -> tuple[dict[str, Array], dict[str, Array]]:
    """The buckets of what trains, and those of what does not."""
    buckets = to_buckets(partition, params)
    frozen = {each.name: buckets.pop(each.name) for each in partition.frozen}
    return buckets, frozen


def partition_specs(state: TrainState) -> TrainState:
    """What of a state is sharded, and over whom, and what is replicated, as `PartitionSpec`s."""

    layouts = state.partition.layouts

    def of_leaf(path: Any, leaf: Any) -> Any:
        # An optimiser's counters are scalars among its buckets, and every device counts for itself.
        if path[0].name not in ("buckets", "frozen", "optimizer") or not leaf.ndim:
            return REPLICATED
        # Optimisers nest their trees as they like; a bucket's name is a key at some depth.
        names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        return next((layouts[name].spec for name in names if name in layouts), SHARDED)

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """`partition_specs` on the devices of a mesh."""
    return named_shardings(partition_specs(state), mesh)


def abstract_state(config: Config, setup: TrainSetup, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of a state, without allocating."""
    state = jax.eval_shape(lambda: init_state(config, setup))
    return abstract(state, shardings(state, mesh))


def to_checkpoint(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds: weights as declared, for whoever reads them, and all the rest as it lies.

    The optimiser's buckets are two thirds of a state. Each device writes its own as they are, and whoever
    reads them on another number of devices partitions them anew.
    """
    return {"weights": state.stored, "training": training_of(state)}


def training_of(state: TrainState) -> dict[str, Any]:
    """What a checkpoint holds beside the weights: the arrays of the state themselves."""
    return {
        "step": state.step,
        "optimizer": state.optimizer,
        "balancer": state.balancer,
        "key": state.key,
        "skipped_steps": state.skipped_steps,
        # By it the partition is known, which says what lies where in the buckets.
        "num_devices": np.int32(state.partition.num_devices),
        "node_devices": np.int32(state.partition.node_devices),
    }


def from_checkpoint(saved: dict[str, Any], like: TrainState, written: TrainState) -> TrainState:
    """`to_checkpoint` undone, for the devices of another state.

    Args:
      saved: what a checkpoint held.
      like: a state on those devices, which may be abstract.
      written: one on as many devices as wrote it, likewise.
    """
    counts = ("num_devices", "node_devices")
    training = {name: value for name, value in saved["training"].items() if name not in counts}
    if written.partition != like.partition:
        training["optimizer"] = _partitioned_anew(training["optimizer"], written, like)
    variables = _variable_fields(like.partition, saved["weights"])
    # All fields at once: between two replacements the state would be half abstract, half of arrays.
    return dataclasses.replace(like, **variables, **training)


def _partitioned_anew(optimizer: Any, written: TrainState, like: TrainState) -> Any:
    """An optimiser's state in the buckets of another number of devices."""

    def whole(buckets: dict) -> dict:
        # Muon's state has masks in place of AdamW's buckets, and the other way round.
        present = {name: x for name, x in buckets.items() if not isinstance(x, optax.MaskedNode)}
        return from_buckets(written.partition, present)

    def refill(buckets: dict, tree: dict) -> dict:
        return buckets | to_buckets(like.partition, tree)  # the masks stay

    return _map_buckets(refill, like, like.optimizer, _map_buckets(whole, written, optimizer))


def checkpoint_shardings(checkpoint: Any, mesh: Mesh, partition: Partition | None = None) -> Any:
    """For `to_checkpoint` or its weights: no device holds all of a large array.

    Args:
      checkpoint: shapes of it.
      mesh: the devices.
      partition: of the weights on them; without it an array may come by all of its devices.
    """
    experts = {
        tuple(path.split("/")): weight.axes.index(EXPERTS)
        for path, weight in (partition.weights if partition else ())
        if partition is not None and partition.node_devices > 1 and weight.of_experts
    }

    def of_leaf(path: Any, leaf: Any) -> Any:
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        axis = next((axis for weight, axis in experts.items() if names[-len(weight) :] == weight), None)
        if axis is None or names[0] == "training":
            return evenly_sharded(mesh, leaf.shape)
        return evenly_sharded_by_node(mesh, leaf.shape, axis)

    return jax.tree_util.tree_map_with_path(of_leaf, checkpoint)


def _map_buckets(function: Any, state: TrainState, *optimizers: Any) -> Any:
    """Maps over the dicts of buckets within optimisers' states; of other leaves the last is taken."""
    names = {bucket.name for bucket in state.partition.buckets}

    def is_buckets(node: Any) -> bool:
        # Optax nests its states as it likes; a dict with exactly these names is found at any depth.
        return isinstance(node, dict) and set(node) == names

    def visit(*nodes: Any) -> Any:
        return function(*nodes) if is_buckets(nodes[0]) else nodes[-1]

    return jax.tree.map(visit, *optimizers, is_leaf=is_buckets)
