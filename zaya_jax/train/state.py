"""Everything that a training step changes, and all that a checkpoint must hold."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from zaya_jax.config import Config
from zaya_jax.model.implementations import resolve_implementations
from zaya_jax.model.weights import declare, initialise
from zaya_jax.model.zaya import Zaya, initial_router_bias
from zaya_jax.optim.balancing import make_balancer
from zaya_jax.optim.optimizer import make_optimizer
from zaya_jax.optim.schedules import learning_rate_schedule
from zaya_jax.parallel.deal import Deal, deal, from_parts, to_parts
from zaya_jax.parallel.mesh import CUT, WHOLE, on_mesh, spread
from zaya_jax.pytree import pytree, static


@pytree
class TrainState:
    """The state of a run. Its step is also the position in the data."""

    step: Int[Array, ""]
    """Optimiser steps done, skipped ones included."""
    parts: dict[str, Array]
    """The weights in float32, as they are dealt out: each device has its part of the first axis."""
    router_bias_LX: Float[Array, "L X"]
    optimizer: Any
    """Of the parts, and dealt out with them."""
    balancer: Any
    """Of the router biases."""
    key: Array
    """The run's randomness after initialisation: samples are drawn from it and the step."""
    skipped_steps: Int[Array, ""]
    """Steps whose loss or gradients were not finite, and which therefore changed nothing."""
    deal: Deal = static()
    """How weights make parts."""

    @property
    def params(self) -> dict:
        """The weights as declared in `zaya_jax.model.weights`, float32."""
        return from_parts(self.deal, self.parts)

    @property
    def variables(self) -> dict:
        """What `Zaya.apply` takes."""
        return {"params": self.params, "router_bias": {"layers": self.router_bias_LX}}


@dataclasses.dataclass(frozen=True)
class Rules:
    """What moves a state. Hashable.

    Attributes:
      model: the network, and how it and its loss are computed, with every implementation named.
      deal: of its weights to devices.
      optimizer: from clipped gradients of a device's parts to their updates.
      balancer: from a batch's counts of tokens to updates of the router's biases.
      clip_norm: the global gradient norm is scaled down to this.
      z_loss: weight of the squared logsumexp.
      update_norms: whether a step tells the norms of updates.
    """

    model: Zaya
    deal: Deal
    optimizer: optax.GradientTransformation
    balancer: optax.GradientTransformation
    clip_norm: float = float("inf")
    z_loss: float = 0.0
    update_norms: bool = True


def make_rules(
    config: Config,
    num_devices: int = 1,
    schedule: optax.Schedule | None = None,
    *,
    platform: str | None = None,
) -> Rules:
    """The rules that a config describes.

    Args:
      config: of a run without phases, or of one phase.
      num_devices: that the weights are dealt out to.
      schedule: the learning rate over the steps of the whole run; None for the config's own.
      platform: that the step is compiled for, as `pallas_kernels.choice.choose` takes it.
    """
    execution = resolve_implementations(config.execution, config.model, platform=platform)
    dealt = deal(declare(config.model), num_devices, by_matrix=config.optimizer.name == "muon")
    schedule = learning_rate_schedule(config) if schedule is None else schedule
    return Rules(
        model=Zaya(config.model, execution),
        deal=dealt,
        optimizer=make_optimizer(
            config.optimizer, dealt, schedule, implementation=execution.newton_schulz_implementation
        ),
        balancer=make_balancer(config.balancing),
        clip_norm=config.optimizer.clip_norm,
        z_loss=config.train.z_loss,
        update_norms=config.train.update_norms,
    )


def init_state(config: Config, rules: Rules) -> TrainState:
    """The state before the first step. Its weights depend on the config alone."""
    init_key, run_key = jax.random.split(jax.random.key(config.train.seed))
    return first_state(rules, initialise(declare(config.model), init_key), run_key)


def first_state(rules: Rules, params: dict, key: Array) -> TrainState:
    """The state before the first step, of given weights."""
    parts = to_parts(rules.deal, params)
    bias_LX = initial_router_bias(rules.model.config)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        parts=parts,
        router_bias_LX=bias_LX,
        optimizer=rules.optimizer.init(parts),
        balancer=rules.balancer.init(bias_LX),
        key=key,
        skipped_steps=jnp.zeros((), jnp.int32),
        deal=rules.deal,
    )


def with_variables(state: TrainState, variables: dict) -> TrainState:
    """The state with other weights and router biases."""
    return dataclasses.replace(state, **_deal_variables(state.deal, variables))


def _deal_variables(dealt: Deal, variables: dict) -> dict[str, Any]:
    return {
        "parts": to_parts(dealt, variables["params"]),
        "router_bias_LX": variables["router_bias"]["layers"],
    }


def layout(state: TrainState) -> TrainState:
    """What of a state is cut and what is whole, as `PartitionSpec`s."""

    def of_leaf(path: Any, leaf: Any) -> Any:
        return CUT if path[0].name in ("parts", "optimizer") and leaf.ndim else WHOLE

    return jax.tree_util.tree_map_with_path(of_leaf, state)


def shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """`layout` on the devices of a mesh."""
    return on_mesh(layout(state), mesh)


def abstract_state(config: Config, rules: Rules, mesh: Mesh) -> TrainState:
    """Shapes, types and shardings of a state, without allocating."""
    state = jax.eval_shape(lambda: init_state(config, rules))
    return _abstract(state, shardings(state, mesh))


def to_checkpoint(state: TrainState) -> dict[str, Any]:
    """A state in arrays that do not depend on the number of devices: weights and moments as declared."""

    def whole(parts: dict) -> dict:
        present = {name: x for name, x in parts.items() if not isinstance(x, optax.MaskedNode)}
        return from_parts(state.deal, present)

    return {
        "weights": state.variables,
        "training": {
            "step": state.step,
            "optimizer": _map_parts(whole, state.optimizer, state),
            "balancer": state.balancer,
            "key": state.key,
            "skipped_steps": state.skipped_steps,
        },
    }


def from_checkpoint(saved: dict[str, Any], like: TrainState) -> TrainState:
    """`to_checkpoint` undone, for the devices of another state, which may be abstract."""

    def deal_again(parts: dict, tree: dict) -> dict:
        return parts | to_parts(like.deal, tree)

    training = dict(saved["training"])
    optimizer = _map_parts(deal_again, like.optimizer, like, training.pop("optimizer"))
    return dataclasses.replace(
        like, **_deal_variables(like.deal, saved["weights"]), optimizer=optimizer, **training
    )


def checkpoint_shardings(checkpoint: Any, mesh: Mesh) -> Any:
    """For `to_checkpoint`: no device holds all of a large array."""
    return jax.tree.map(lambda x: spread(mesh, x.shape), checkpoint)


def _map_parts(function: Any, tree: Any, state: TrainState, *rest: Any) -> Any:
    """Maps over the dicts of parts within an optimiser's state, and leaves other leaves alone."""
    names = {part.name for part in state.deal.parts}

    def is_parts(node: Any) -> bool:
        return isinstance(node, dict) and set(node) == names

    def visit(node: Any, *others: Any) -> Any:
        if is_parts(node):
            return function(node, *others)
        return others[0] if others else node

    return jax.tree.map(visit, tree, *rest, is_leaf=is_parts)


def _abstract(tree: Any, placed: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, placed)
