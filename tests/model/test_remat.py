"""Scans over layers whose inputs are fetched a group ahead, compared with a plain scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.model.remat import scan_layers, scan_prefetched

LAYERS = 6


def step(x, layer):
    scale, weights = layer
    y = jnp.tanh(x @ weights) * scale
    return y, y.sum()


def fetch(rows):
    return jax.tree.map(lambda x: 2.0 * x, rows)


@pytest.mark.parametrize(("size", "remat"), [(1, "layer"), (2, "products"), (3, "none"), (1, "group")])
def test_prefetched_layers_equal_layers_in_a_plain_scan(size, remat):
    random = np.random.default_rng(0)
    x, scale_L, rows_L = (
        jnp.asarray(random.standard_normal(shape), jnp.float32)
        for shape in ((4, 8), (LAYERS,), (LAYERS, 8, 8))
    )

    def plain(x, scale_L, rows_L):
        return scan_layers(step, x, (scale_L, fetch(rows_L)), remat=remat, unroll=False)

    def prefetched(x, scale_L, rows_L):
        return scan_prefetched(step, x, scale_L, rows_L, fetch=fetch, size=size, remat=remat)

    @functools.partial(jax.jit, static_argnums=0)
    def with_gradient(scan, *arguments):
        def total(*arguments):
            x, outputs_L = scan(*arguments)
            return jnp.sum(x**2) + jnp.vdot(outputs_L, jnp.arange(LAYERS)), outputs_L

        return jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True)(*arguments)

    actual, expected = (with_gradient(scan, x, scale_L, rows_L) for scan in (prefetched, plain))
    # The same operations in another loop: XLA may fuse, and so round, them differently.
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected)
