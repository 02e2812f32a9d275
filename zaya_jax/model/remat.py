"""What the backward pass recomputes rather than keeps.

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
    # Products with weights have no batch dimension; those of attention and experts do, and go by their names.
    "products": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable, _keep_products
    ),
    "attention_and_experts": _keep_products,
    "block": _keep_names(STREAM),
    "layer": jax.checkpoint_policies.nothing_saveable,
    "group": jax.checkpoint_policies.nothing_saveable,
}
"""What is kept of a layer, by the names that `ExecutionConfig.remat` has besides "none"; described there."""


def group_size(num_layers: int) -> int:
    """Layers of a group of the policy "group".

    Kept are the streams before all groups, and while one of them is worked on those before its layers.
    The divisor of the number of layers that makes both together fewest, about its square root; 1 of a
    prime number, and the policy is then the same as "layer".
    """
    divisors = (size for size in range(1, num_layers + 1) if num_layers % size == 0)
    return min(divisors, key=lambda size: num_layers // size + size)


def scan_layers(
    step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, layers_L: Any, *, remat: str, unroll: bool
) -> Any:
    """`lax.scan(step, carry, layers_L)`, of which the backward pass keeps what the policy says.

    Args:
      step: of one layer.
      carry: before the first.
      layers_L: inputs of the layers, stacked.
      remat: as `ExecutionConfig.remat`.
      unroll: compiles every layer on its own.
    """
    scan = functools.partial(lax.scan, unroll=unroll)
    if remat == "none":
        return scan(step, carry, layers_L)
    # Within a group too: else its backward pass would keep all of its layers' results at once.
    step = jax.checkpoint(step, policy=REMAT_POLICIES[remat])
    size = group_size(len(jax.tree.leaves(layers_L)[0]))
    if remat != "group" or size == 1:
        return scan(step, carry, layers_L)

    # The outer checkpoint keeps the streams between groups alone, and runs a group again as a whole
    # ([Sublinear] section 4.2: sqrt(n) of them cost one more forward pass).
    @jax.checkpoint
    def step_of_group(carry: Any, layers: Any) -> tuple[Any, Any]:
        return scan(step, carry, layers)

    groups = jax.tree.map(lambda x: x.reshape(-1, size, *x.shape[1:]), layers_L)
    carry, outputs = scan(step_of_group, carry, groups)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs)
