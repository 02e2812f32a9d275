"""Second half of a weight's gradient: programs write partial sums, and this kernel adds them up.

The order of additions is fixed, so that a gradient has the same bits in every run, unlike with atomics.
Letters: S sums, R partial sums of each, X entries.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import launch, load, store
from pallas_kernels.blocks import KernelSettings

MOST_ROWS = 16
"""Maximum of partial sums of an entry that a program reads at once."""
BLOCK = 1024
"""Numbers that a program reads at once: 16 bytes for each of its 256 lanes."""


def sum_shares(shares_SRX: jax.Array, *, name: str) -> jax.Array:
    """Returns the sums over the partial sums, [S, X], float32.

    Args:
      shares_SRX: partial sums, float32.
      name: name of the kernel in profiles.
    """
    num_sums, num_shares, num_entries = shares_SRX.shape
    # With few partial sums, most of a block of 16 rows would be masked, and its waves would exchange zeros
    # through local memory. As many rows as there are partial sums leave more entries to a program.
    rows = min(MOST_ROWS, pl.next_power_of_2(num_shares))
    entries = BLOCK // rows

    def kernel(shares, sums):
        number, entry = pl.program_id(0), pl.program_id(1) * entries
        there = entry + jnp.arange(entries) < num_entries

        def step(i, total):
            mask = (i * rows + jnp.arange(rows) < num_shares)[:, None] & there[None, :]
            at = shares.at[number, pl.ds(i * rows, rows), pl.ds(entry, entries)]
            return total + load(at, mask)

        # One running sum for each row of a block: no addition waits for the one of the previous row.
        zeros = jnp.zeros((rows, entries), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(num_shares, rows), step, zeros)
        store(sums.at[number, pl.ds(entry, entries)], jnp.sum(total, axis=0), there)

    grid = num_sums, pl.cdiv(num_entries, entries)
    result = jax.ShapeDtypeStruct((num_sums, num_entries), jnp.float32)
    (sums_SX,) = launch(kernel, (shares_SRX,), [result], KernelSettings(), grid=grid, name=name)
    return sums_SX
