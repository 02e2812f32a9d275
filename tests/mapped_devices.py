"""Devices simulated as mapped axes on one device, for functions that know the mesh only by axis names."""

import jax

from zaya_jax.parallel.mesh import ALL


def mapped_over(axes, function):
    """Maps a function over devices along some axes; all other axes have one device."""
    mapped = jax.vmap(function, axis_name=axes[0])
    for axis in ALL:
        if axis != axes[0]:
            mapped = jax.vmap(mapped, axis_name=axis, axis_size=1, in_axes=None)
    return lambda *arguments: jax.tree.map(lambda x: x[0, 0, 0], mapped(*arguments))
