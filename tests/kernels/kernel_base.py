"""Shared by the tests of all kernels: float64 references, error bounds, finite differences.

The reference of a kernel is its specification in plain jnp, computed in float64, with JAX's gradients. The
error of a result is the norm of its difference relative to the norm of the reference.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROUNDOFF = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Half a unit in the last place: the relative error of one rounding."""


NUM_FAST_SHAPES = 6


def in_turn(shapes):
    """Returns cases of (shape, dtype): each shape in one of the two dtypes, so that both see all kinds of
    shapes. Those after the first `NUM_FAST_SHAPES` are campaigns.
    """
    return [
        pytest.param(
            shape, list(ROUNDOFF)[i % 2], marks=[pytest.mark.campaign] if i >= NUM_FAST_SHAPES else []
        )
        for i, shape in enumerate(shapes)
    ]


FORMS = ("pallas", "xla")
"""Each form of an operation that has a kernel is held to the one specification."""

QUICK = {"xla_backend_optimization_level": 0}
if jax.__version_info__ < (0, 11):  # later ones have no such option
    QUICK["xla_cpu_use_fusion_emitters"] = False
"""Nearly all the time of a test goes into compiling; these make it a quarter."""
fast_jit = functools.partial(jax.jit, compiler_options=QUICK)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


def normals(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.standard_normal(shape) for shape in shapes]


def rounded(tree, dtype):
    """Returns the arguments of the kernel, and the same values in float64 for the reference."""
    low = jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
    return low, jax.tree.map(lambda x: np.asarray(x, np.float64), low)


def value_and_pullback(function: Callable, arguments, cotangents):
    """Returns results and gradients of all arguments, compiled."""

    @fast_jit
    def both(arguments, cotangents):
        results, pull_back = jax.vjp(function, *arguments)
        return results, pull_back(cotangents)

    return both(arguments, cotangents)


def in_float64(function: Callable, arguments, cotangents):
    """Returns the reference's results and gradients, from float64 arguments."""
    with float64():
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (arguments, cotangents))
        results, gradients = value_and_pullback(function, *wide)
        return jax.tree.map(lambda x: np.asarray(x, np.float64), (results, gradients))


def relative_error(result, expected) -> float:
    """Returns the norm of the difference relative to that of the reference; absolute if that is zero."""
    result, expected = np.asarray(result, np.float64), np.asarray(expected)
    assert result.shape == expected.shape
    size = np.linalg.norm(expected)
    return float(np.linalg.norm(result - expected) / (size if size > 0 else 1))


def assert_close(results, expected, bounds) -> None:
    """Checks each result against its bound. NaN exceeds every bound."""
    named, _ = jax.tree.flatten_with_path(results)
    wanted, limits = jax.tree.leaves(expected), jax.tree.leaves(bounds)
    assert len(named) == len(wanted) == len(limits)
    errors = {
        jax.tree_util.keystr(path): (relative_error(result, right), limit)
        for (path, result), right, limit in zip(named, wanted, limits, strict=True)
    }
    beyond = {name: (error, limit) for name, (error, limit) in errors.items() if not error <= limit}
    assert not beyond, f"relative errors beyond their bounds: {beyond}; all: {errors}"


def assert_gradients_are_differences(
    function: Callable, reference: Callable, arguments, cotangents, *, bound: float, step: float = 1e-3
) -> None:
    """Compares a kernel's gradients along a random direction with finite differences of its float64
    specification.

    Nothing that JAX derives takes part in this comparison. The difference is central and of fourth order: its
    error, step^4, is invisible in float32.
    """
    _, gradients = value_and_pullback(function, arguments, cotangents)
    leaves, tree = jax.tree.flatten(arguments)
    directions = normals(99, *(x.shape for x in leaves))
    ours = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(gradients), directions, strict=True))

    def at(distance):
        moved = [np.asarray(x, np.float64) + distance * d for x, d in zip(leaves, directions, strict=True)]
        results = compiled(*jax.tree.unflatten(tree, [jnp.asarray(x) for x in moved]))
        pairs = zip(jax.tree.leaves(results), jax.tree.leaves(cotangents), strict=True)
        return sum(np.vdot(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs)

    with float64():
        compiled = fast_jit(reference)
        expected = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
    size = np.sqrt(sum(np.vdot(g, g) for g in jax.tree.leaves(gradients)))
    assert abs(ours - expected) <= bound * size * np.sqrt(sum(d.size for d in directions))
