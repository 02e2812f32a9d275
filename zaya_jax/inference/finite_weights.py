"""Rejects weights with NaN or infinity, from a run that diverged or a faulty conversion."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.errors import UserError

MAX_NAMES = 3
"""Maximum number of weights that an error message names."""
PART_SIZE = 2**24
"""Values that NumPy checks at once, which bounds the memory."""


def check_finite(variables: Mapping, run_folder: str, step: int) -> None:
    """Checks that weights are finite; otherwise all logits would be NaN.

    Args:
      variables: weights, as `Zaya.apply` accepts them.
      run_folder: folder of the run, for the message.
      step: step of the checkpoint, for the message.

    Raises:
      UserError: with the names of weights that have NaN or infinity.
    """
    leaves = jax.tree.leaves_with_path(variables)
    # Names such as params/layers/experts/down_proj.
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    # A router bias of -inf is legitimate: it disables an expert.
    bad = [
        name
        for name, (_, x) in zip(names, leaves, strict=True)
        if not _is_finite(x, with_minus_infinity=name.startswith("router_bias"))
    ]
    if not bad:
        return
    shown = ", ".join(bad[:MAX_NAMES])
    more = f" and {len(bad) - MAX_NAMES} more weights" if len(bad) > MAX_NAMES else ""
    raise UserError(
        f"{run_folder}, step {step}: NaN or infinity in {shown}{more}, so that no text can be generated; use "
        f"an earlier step (zaya ckpt ls {run_folder}, then zaya ckpt reshape {run_folder}:STEP OUT "
        "--weights-only), or convert the weights again"
    )


def _is_finite(x: jax.Array | np.ndarray, *, with_minus_infinity: bool) -> bool:
    # On an accelerator the device checks: copying all weights to the host would take longer.
    if isinstance(x, jax.Array) and any(device.platform != "cpu" for device in x.devices()):
        return bool(_is_finite_on_device(x, with_minus_infinity=with_minus_infinity))
    # On CPUs NumPy reads the array in place: nothing is compiled before an invalid option is reported.
    # On a CPU this is a view, not a copy.
    flat = np.asarray(x).reshape(-1)
    parts = (flat[first : first + PART_SIZE] for first in range(0, flat.size, PART_SIZE))
    return all(_has_only_finite(np, part, with_minus_infinity).all() for part in parts)


@functools.partial(jax.jit, static_argnames="with_minus_infinity")
def _is_finite_on_device(x: jax.Array, *, with_minus_infinity: bool) -> jax.Array:
    return _has_only_finite(jnp, x, with_minus_infinity).all()


def _has_only_finite(numpy: Any, x: Any, with_minus_infinity: bool) -> Any:
    """Returns for each value whether it is allowed."""
    is_finite = numpy.isfinite(x)
    return is_finite | (x == -numpy.inf) if with_minus_infinity else is_finite
