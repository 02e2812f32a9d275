"""Checksums of what a single device owns, written after each update and compared before the next one.

Shards of weights, moments and summed gradients have one owner, so no replica exists to compare them with. A
bit that flips in them between two uses changes their checksum instead. The step compares, on each device:

- the arrays of the state with their checksums after the last update;
- summed gradients right before the update with their checksums right after the sum;
- the rows of the batch with checksums that the host computed from what it sent, and their global indices with
  those of this step.

If any comparison fails on any device, this step and all later ones change nothing but counters, until the
host reads the result and ends the run.

Letters: D devices, K arrays of the state, W weights, G buckets of gradients, F comparisons, B rows, C devices
of a sequence.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, UInt32

from zaya_jax.data.reading.batch import Batch
from zaya_jax.parallel.mesh import all_reduce, place_among_rows, place_row_values, place_rows
from zaya_jax.pytree import pytree

ROWS, ORDER = "rows of the batch", "order of the batch"
"""Names of the comparisons of inputs: their bits, and their place in the data."""
OWN_FIELDS = ("buckets", "frozen", "router_bias_LX", "optimizer", "balancer", "ema")
"""Fields of `TrainState` that have checksums; the others are counters that every step changes."""


@pytree
class Integrity:
    """Checksums of each device, and the comparisons that failed there.

    Attributes:
      state_DK: checksums of the arrays of the state after the last update.
      gradients_DW: checksums of each device's gradients in the last step before they were summed, by weight;
        W is 0 unless steps can be replayed.
      sums_DG: checksums of its shards of the summed gradients in the last step, by bucket.
      failed_DF: first step in which each comparison failed, counted from 1; 0 if it never failed.
    """

    state_DK: UInt32[Array, "D K"]
    gradients_DW: UInt32[Array, "D W"]
    sums_DG: UInt32[Array, "D G"]
    failed_DF: UInt32[Array, "D F"]


@dataclasses.dataclass(frozen=True)
class Names:
    """Names of the columns of `Integrity`.

    Attributes:
      state: arrays of the state.
      gradients: weights whose gradients have checksums before they are summed.
      sums: buckets of summed gradients.
    """

    state: tuple[str, ...]
    gradients: tuple[str, ...]
    sums: tuple[str, ...]

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the columns of `failed_DF`: what is compared with a checksum or an expected order."""
        return (*self.state, *(f"summed gradient of {name}" for name in self.sums), ROWS, ORDER)


def names_of(state: Any, *, has_gradients: bool) -> Names:
    """Returns the names of the columns of a state's `Integrity`.

    Args:
      state: a state, or its shapes.
      has_gradients: whether gradients have checksums before they are summed.
    """
    paths = (jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in _own_arrays(state))
    trained = {path: 0 for path, weight in state.partition.weights if weight.trains}
    # A tree of gradients has sorted keys at each level, as all trees of JAX.
    return Names(
        state=tuple(paths),
        gradients=tuple(sorted(trained, key=lambda path: path.split("/"))) if has_gradients else (),
        sums=tuple(sorted(state.buckets)),
    )


def no_checksums(state: Any, *, has_gradients: bool) -> Integrity:
    """Returns an `Integrity` of zeros, whose `state_DK` must be set before the first step."""
    names = names_of(state, has_gradients=has_gradients)
    counts = map(len, (names.state, names.gradients, names.sums, names.failed))
    return Integrity(*(jnp.zeros((state.partition.num_devices, count), jnp.uint32) for count in counts))


def state_checksums(state: Any, *, after: jax.Array | None = None) -> UInt32[Array, "K"]:
    """Returns the checksum of each array of a device's part of a state; `after` as in `checksum`."""
    return _stacked([x for _, x in _own_arrays(state)], after)


def tree_checksums(tree: Any, *, after: jax.Array | None = None) -> UInt32[Array, "N"]:
    """Returns the checksum of each array of a tree; `after` as in `checksum`."""
    return _stacked(jax.tree.leaves(tree), after)


def _own_arrays(state: Any) -> list[tuple[Any, Any]]:
    # By path, whose order is the same for arrays, shapes and specs.
    fields = {name: getattr(state, name) for name in OWN_FIELDS}
    return jax.tree_util.tree_leaves_with_path(fields)


def _stacked(arrays: list[jax.Array], after: jax.Array | None) -> jax.Array:
    # One checksum per array, so that a mismatch has a name; each is a single pass over its array.
    sums = [array_checksum(x, after=after) for x in arrays]
    return jnp.stack(sums) if sums else jnp.zeros(0, jnp.uint32)


def checksum(tree: Any) -> UInt32[Array, ""]:
    """Returns a checksum of all arrays, modulo 2**32, that any single flipped bit changes."""
    sums = map(array_checksum, jax.tree.leaves(tree))
    return functools.reduce(lambda total, each: 3 * total + each, sums, jnp.uint32(0))


def array_checksum(array: jax.Array, *, after: jax.Array | None = None) -> UInt32[Array, ""]:
    """Returns the sum of all bit patterns times odd factors, modulo 2**32.

    A flipped bit k changes the sum by 2**k times an odd number, which is never 0. Different factors of
    neighbors make it depend on the order of the elements.

    Args:
      array: an array of any type.
      after: float32 scalar that must be computed first; the checksum does not depend on its value. The
        compiler can neither compute such a checksum earlier nor reuse one that it has computed.
    """
    bits = _bits(array)
    # Indices of each axis instead of a flat array, which the compiler may have to transpose.
    strides = [math.prod(array.shape[axis + 1 :]) % 2**32 for axis in range(array.ndim)]
    places = sum(
        (
            lax.broadcasted_iota(jnp.uint32, array.shape, axis) * np.uint32(n)
            for axis, n in enumerate(strides)
        ),
        start=jnp.uint32(0),
    )
    factors = 2 * places + 1
    if after is None:
        return jnp.sum(bits * factors, dtype=jnp.uint32)
    # The value is added to every word and its effect subtracted again: a true dependence, which survives
    # passes of the compiler that remove barriers or merge equal expressions.
    shift = lax.bitcast_convert_type(after, jnp.uint32)
    # The sum of the first n odd numbers is n**2.
    return jnp.sum((bits + shift) * factors, dtype=jnp.uint32) - shift * np.uint32(array.size**2 % 2**32)


def _bits(array: jax.Array) -> UInt32[Array, "..."]:
    # Bits, not values: as numbers -0.0 equals 0.0, and NaN does not equal NaN.
    unsigned = jnp.dtype(f"uint{array.dtype.itemsize * 8}")
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def compare(
    state: Any, batch: Batch, gradients: Any, norm: jax.Array, *, written: Integrity | None
) -> tuple[Integrity | None, UInt32[Array, ""] | None, UInt32[Array, ""] | None]:
    """Compares what a device is about to use with its checksums; called within `on_each_device`.

    Args:
      state: this device's part of the state.
      batch: its rows, with their origin.
      gradients: its shards of the summed gradients, as the update reads them.
      norm: norm of all gradients. All is compared after it is known, which is as late as possible: what
        changes during the forward and backward pass is noticed as well.
      written: checksums of this step; None without checksums.

    Returns:
      The checksums with new failures, the number of failures on all devices, and a checksum of the rows of
      all devices that depends on their order; three None without checksums.
    """
    if written is None:
        return None, None, None
    with jax.named_scope("checksums"):
        differs_F = jnp.concatenate(
            [
                state_checksums(state, after=norm) != written.state_DK[0],
                tree_checksums(gradients, after=norm) != written.sums_DG[0],
                _compare_rows(batch, state.step),
            ]
        )
        # The first failure stays: later ones may be its consequences.
        before_F, now = written.failed_DF[0], (state.step + 1).astype(jnp.uint32)
        failed_F = jnp.where(before_F == 0, differs_F * now, before_F)
        num_failed = jnp.sum(failed_F != 0, dtype=jnp.uint32)
        # In one message: a collective of all devices has a high latency.
        mismatches, data = all_reduce(jnp.stack([num_failed, _data_checksum(batch)]))
        return dataclasses.replace(written, failed_DF=failed_F[None]), mismatches, data


def with_state_checksums(state: Any, integrity: Integrity | None, mismatches: jax.Array | None) -> Any:
    """Returns this device's part of a state after a step, with checksums of its arrays.

    Args:
      state: state after the step.
      integrity: results of the comparison before the update; None without checksums.
      mismatches: number of failures; after one the checksums stay, which a changed state does not have.
    """
    if integrity is None:
        return state
    # A barrier, so that checksums are of the stored arrays: a fusion might compute these again, and round
    # them differently.
    stored = lax.optimization_barrier(dataclasses.replace(state, integrity=None, key=jnp.zeros(())))
    with jax.named_scope("checksums"):
        state_K = jnp.where(mismatches == 0, state_checksums(stored), integrity.state_DK[0])
    stored = dataclasses.replace(stored, key=state.key)
    return dataclasses.replace(stored, integrity=dataclasses.replace(integrity, state_DK=state_K[None]))


def _data_checksum(batch: Batch) -> UInt32[Array, ""]:
    index_B, checksum_B = _origin(batch)
    return jnp.sum((2 * index_B + 1) * checksum_B, dtype=jnp.uint32)


def _origin(batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the global index and the host's checksum of each row of this device."""
    assert batch.origin_BC2 is not None, "batches of a run with checksums have origins"
    origin_BC2 = jnp.asarray(batch.origin_BC2)
    return origin_BC2[:, 0, 0], origin_BC2[:, 0, 1]


def _compare_rows(batch: Batch, step: jax.Array) -> Bool[Array, "2"]:
    """Compares the bits of a device's rows, and their places in the data."""
    index_B, expected_B = _origin(batch)
    # Rows are counted from the start of the range as if each step had as many as the steps of this range.
    place, num_places = place_among_rows()
    first = (step.astype(jnp.uint32) * num_places + place.astype(jnp.uint32)) * index_B.size
    place_B = first + lax.iota(jnp.uint32, index_B.size)
    bits_differ = jnp.any(row_checksums(batch) != expected_B)
    return jnp.stack([bits_differ, jnp.any(index_B != place_B)])


def row_checksums(batch: Batch) -> UInt32[Array | np.ndarray, "B"]:
    """Returns the checksum of each row of a batch, without its origin; numpy arrays are computed by numpy."""
    arrays = jax.tree.leaves(dataclasses.replace(batch, origin_BC2=None))
    return functools.reduce(lambda total, each: 3 * total + each, map(_row_checksums, arrays))


def _row_checksums(rows: Any) -> Any:
    # The host and the device must agree on every bit, so both run the same lines.
    module, bits = (np, rows.view(np.uint32)) if isinstance(rows, np.ndarray) else (jnp, _bits(rows))
    bits = bits.reshape(len(rows), -1)
    factors = 2 * module.arange(bits.shape[1], dtype=np.uint32) + np.uint32(1)
    return module.sum(bits * factors, axis=1, dtype=np.uint32)


def place_batch(batch: Batch, mesh: Mesh) -> Batch:
    """Places a batch as `place_rows`, with checksums of each device's part if the batch has an origin.

    Args:
      batch: rows that this process has read, on the host.
      mesh: devices of all processes.
    """
    origin_BC2 = batch.origin_BC2
    if origin_BC2 is None:
        return place_rows(batch, mesh)
    # The index travels as one more array of the batch, so that each device gets the indices of its rows.
    index_BT = np.broadcast_to(origin_BC2[:, :1, 0], batch.tokens_BT.shape)
    plain = dataclasses.replace(batch, origin_BC2=None)

    def values(part: tuple[Batch, np.ndarray]) -> np.ndarray:
        rows, own_index_BT = part
        return np.stack([own_index_BT[:, 0], row_checksums(rows)], axis=1)

    placed_BC2 = place_row_values((plain, index_BT), mesh, values, num_values=2)
    return dataclasses.replace(place_rows(plain, mesh), origin_BC2=placed_BC2)
