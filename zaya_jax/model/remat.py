"""Rematerialization: what the backward pass recomputes instead of keeping.

Letters: L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.checkpoint_names import KEPT, PRODUCT, STREAM

_keep_names = jax.checkpoint_policies.save_only_these_names

REMAT_POLICIES = {
    "products": _keep_names(KEPT, PRODUCT),
    "attention_and_experts": _keep_names(KEPT),
    "block": _keep_names(STREAM),
    "layer": jax.checkpoint_policies.nothing_saveable,
    "group": jax.checkpoint_policies.nothing_saveable,
}
"""Policy by the values of `ExecutionConfig.remat`, where they are described, except "none"."""

KEEP_PRODUCTS = ("none", "products", "attention_and_experts")
"""Policies that keep the results of the experts' products."""


def group_size(num_layers: int) -> int:
    """Number of layers per group of the policy "group".

    The backward pass keeps the streams before all groups, and those before the layers of the current group.
    The result is the divisor of the number of layers that minimizes their total, about its square root. For a
    prime number it is 1, and the policy is the same as "layer".
    """
    divisors = (size for size in range(1, num_layers + 1) if num_layers % size == 0)
    return min(divisors, key=lambda size: num_layers // size + size)


def scan_layers(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, layers_L: Any, *, remat: str, unroll: bool
) -> Any:
    """`lax.scan(step, carry, layers_L)` with a rematerialization policy.

    Args:
      step: function of one layer.
      carry: initial carry.
      layers_L: stacked inputs of the layers.
      remat: policy, as `ExecutionConfig.remat`.
      unroll: whether to compile every layer separately.
    """
    scan = functools.partial(lax.scan, unroll=unroll)
    # Also within a group, whose backward pass would otherwise keep the results of all its layers.
    step = _checkpointed(step, remat)
    size = group_size(_num_layers(layers_L))
    if remat != "group" or size == 1:
        return scan(step, carry, layers_L)
    # The outer checkpoint keeps only the streams between groups, and recomputes a group as a whole
    # ([Sublinear] section 4.2: sqrt(n) groups cost one more forward pass).
    step_of_group = jax.checkpoint(functools.partial(scan, step))
    carry, outputs = scan(step_of_group, carry, _in_groups(layers_L, size))
    return carry, _in_layers(outputs)


def scan_prefetched(
    step: Callable[[Any, Any], tuple[Any, Any]],
    carry: Any,
    layers_L: Any,
    rows_L: Any,
    *,
    fetch: Callable[[Any], Any],
    size: int,
    remat: str,
) -> Any:
    """`scan_layers` with inputs that come from other devices, for a group of layers at a time.

    The inputs of the next group are fetched during a group. Their gradients leave while those of a group are
    computed.

    Args:
      step: function of one layer, whose inputs are a pair: those in `layers_L`, and those fetched.
      carry: initial carry.
      layers_L: stacked inputs of the layers.
      rows_L: stacked arrays to fetch inputs of the layers with.
      fetch: function from `rows_L` of a group to the stacked inputs of its layers; it needs no residuals.
      size: number of layers per group, a divisor of their number; the policy "group" has other groups.
      remat: policy, as `ExecutionConfig.remat`.
    """
    step = _checkpointed(step, remat)
    if remat == "group":
        size, group = group_size(_num_layers(layers_L)), jax.checkpoint(functools.partial(lax.scan, step))
    else:
        # A loop within the loop would copy what it keeps for the backward pass.
        group = functools.partial(_unrolled, step)

    def step_of_group(carry: Any, inputs: Any) -> tuple[Any, Any]:
        (carry, fetched), (layers, next_rows) = carry, inputs
        # Started before the computation of this group and needed by the next one, so that it overlaps. Not
        # within a checkpoint, whose recomputation would fetch again.
        following = fetch(next_rows)
        carry, outputs = group(carry, (layers, fetched))
        return (carry, following), outputs

    layers, rows = _in_groups((layers_L, rows_L), size)
    # The last group fetches for the first one, which is not used: one superfluous transfer.
    next_rows = jax.tree.map(lambda x: jnp.roll(x, -1, axis=0), rows)
    first = fetch(jax.tree.map(lambda x: x[0], rows))
    (carry, _), outputs = lax.scan(step_of_group, (carry, first), (layers, next_rows))
    return carry, _in_layers(outputs)


def _checkpointed(step: Any, remat: str) -> Any:
    return step if remat == "none" else jax.checkpoint(step, policy=REMAT_POLICIES[remat])


def _unrolled(step: Any, carry: Any, layers: Any) -> tuple[Any, Any]:
    # Only the loop over groups keeps results for the backward pass: separately for the first layer of all
    # groups, the second one, and so on.
    outputs = []
    for i in range(_num_layers(layers)):
        carry, output = step(carry, jax.tree.map(lambda x, i=i: x[i], layers))
        outputs.append(output)
    return carry, jax.tree.map(lambda *x: jnp.stack(x), *outputs)


def _num_layers(layers_L: Any) -> int:
    return len(jax.tree.leaves(layers_L)[0])


def _in_groups(layers_L: Any, size: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), layers_L)


def _in_layers(groups: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), groups)
