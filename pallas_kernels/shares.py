"""The second half of a weight's gradient: programs leave their shares, and a kernel adds them up.

Always in one order, so that a gradient is the same in every run. Letters: S sums, R shares, X entries.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.backend import launch, load, store
from pallas_kernels.blocks import KernelSettings

ROWS = 16
"""Shares that a program reads at once."""
ENTRIES = 64
"""Entries that a program adds up."""


def sum_shares(shares_SRX: jax.Array, *, name: str) -> jax.Array:
    """Sums over the shares, [S, X].

    Args:
      shares_SRX: float32.
      name: of the kernel.
    """
    num_sums, num_shares, num_entries = shares_SRX.shape

    def kernel(shares, sums):
        number, entry = pl.program_id(0), pl.program_id(1) * ENTRIES
        there = entry + jnp.arange(ENTRIES) < num_entries

        def step(i, total):
            mask = (i * ROWS + jnp.arange(ROWS) < num_shares)[:, None] & there[None, :]
            at = shares.at[number, pl.ds(i * ROWS, ROWS), pl.ds(entry, ENTRIES)]
            return total + load(at, mask)

        zeros = jnp.zeros((ROWS, ENTRIES), jnp.float32)
        total = lax.fori_loop(0, pl.cdiv(num_shares, ROWS), step, zeros)
        store(sums.at[number, pl.ds(entry, ENTRIES)], jnp.sum(total, axis=0), there)

    grid = num_sums, pl.cdiv(num_entries, ENTRIES)
    result = jax.ShapeDtypeStruct((num_sums, num_entries), jnp.float32)
    (sums_SX,) = launch(kernel, (shares_SRX,), [result], KernelSettings(), grid=grid, name=name)
    return sums_SX
