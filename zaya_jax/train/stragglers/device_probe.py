"""A small fixed computation on each local device, without collectives, whose time shows a slow device.

[MegaScale] finds slow machines by timing parts of the step itself, which a compiled step does not
offer; a fixed computation also compares devices that have different work."""

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

NUM_REPEATS = 3
"""Number of timed repetitions; the fastest one counts, because interruptions only ever add time."""
NUM_ROUNDS = 8
"""Number of matrix products and copies of a repetition."""
WIDTH = 4096
"""Width of the square matrices: enough work for all compute units, 32 MiB in bfloat16."""
COPIES = 2
"""Size of the copied array in matrices."""


@jax.jit
def _probe(matrix_NN: jax.Array) -> jax.Array:
    def add_round(_: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        product_NN, copied_KNN = carry
        # Powers of the identity stay finite.
        return product_NN @ matrix_NN, copied_KNN + product_NN[0, 0]

    copied_KNN = jnp.zeros((COPIES, *matrix_NN.shape), matrix_NN.dtype)
    product_NN, copied_KNN = jax.lax.fori_loop(0, NUM_ROUNDS, add_round, (matrix_NN, copied_KNN))
    return product_NN[0, 0] + copied_KNN[-1, -1, -1]


class DeviceProbe:
    """Times the probe on each device of this process; all its arrays are freed afterwards.

    Args:
      devices: local devices; they must be idle when they are timed.
      width: width of the matrices.
    """

    def __init__(self, devices: Sequence[Any], *, width: int = WIDTH):
        self.devices, self._width = devices, width
        self._is_compiled = False

    def seconds(self) -> list[float]:
        """Returns the seconds of the fastest repetition on each device, one device after the other."""
        repeats = NUM_REPEATS + (not self._is_compiled)
        self._is_compiled = True
        return [min([self._time(device) for _ in range(repeats)]) for device in self.devices]

    def _time(self, device: Any) -> float:
        with jax.default_device(device):
            matrix_NN = jax.block_until_ready(jnp.eye(self._width, dtype=jnp.bfloat16))
            start = time.perf_counter()
            jax.block_until_ready(_probe(matrix_NN))
            return time.perf_counter() - start
