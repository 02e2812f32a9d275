"""Compiler options: those that the installed version of XLA has."""

import jax
import jax.numpy as jnp
import pytest

from zaya_jax.platform.compiler import OVERLAP_GATHERS, known


def test_options_that_this_xla_does_not_have_are_dropped():
    """GPU options are also parsed on CPUs."""
    options = known(OVERLAP_GATHERS | {"xla_gpu_no_such_option": 1})
    assert options == OVERLAP_GATHERS
    add = jax.jit(lambda x: x + 1, compiler_options=options)
    assert add(jnp.ones(())) == 2


def test_a_wrong_value_is_an_error():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_autotune_level"):
        known({"xla_gpu_autotune_level": "highest"})
