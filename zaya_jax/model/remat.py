"""Rematerialization: what the backward pass recomputes instead of keeping.

Letters: L layers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import lax

from pallas_kernels.checkpoint_names import KEPT, STREAM

_keep_names = jax.checkpoint_policies.save_only_these_names
_keep_products = _keep_names(KEPT)

REMAT_POLICIES = {
    # Products with weights have no batch dimension; those of attention and experts do, and are kept by name.
    "products": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _keep_products
    ),
    "attention_and_experts": _keep_products,
    "block": _keep_names(STREAM),
    "layer": jax.checkpoint_policies.nothing_saveable,
    "group": jax.checkpoint_policies.nothing_saveable,
}
"""Policy by the values of `ExecutionConfig.remat`, where they are described, except "none"."""


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
    if remat == "none":
        return scan(step, carry, layers_L)
    # Also within a group, whose backward pass would otherwise keep the results of all its layers.
    step = jax.checkpoint(step, policy=REMAT_POLICIES[remat])
    size = group_size(len(jax.tree.leaves(layers_L)[0]))
    if remat != "group" or size == 1:
        return scan(step, carry, layers_L)

    # The outer checkpoint keeps only the streams between groups, and recomputes a group as a whole
    # ([Sublinear] section 4.2: sqrt(n) groups cost one more forward pass).
    @jax.checkpoint
    def step_of_group(carry: Any, layers: Any) -> tuple[Any, Any]:
        return scan(step, carry, layers)

    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), layers_L)
    carry, outputs = scan(step_of_group, carry, groups)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
