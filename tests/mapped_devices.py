"""Devices as mapped axes of one: what a function does there that knows the mesh by its axes' names alone."""

import jax

from zaya_jax.parallel.mesh import ALL


def mapped_over(axes, function):
    """A function of what each device along some axes has; there is one along all others."""
    mapped = jax.vmap(function, axis_name=axes[0])
    for axis in ALL:
        if axis != axes[0]:
            mapped = jax.vmap(mapped, axis_name=axis, axis_size=1, in_axes=None)
    return lambda *arguments: jax.tree.map(lambda x: x[0, 0, 0], mapped(*arguments))
