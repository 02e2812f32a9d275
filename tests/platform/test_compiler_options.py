"""What the compiler is told: options that this jax's XLA knows."""

import jax
import jax.numpy as jnp
import pytest

from zaya_jax.platform.compiler import HIDES_GATHERS


def test_this_xla_knows_the_options_of_gathers():
    """A GPU's options parse on CPUs too; one that is unknown would end a run at its start."""
    add = jax.jit(lambda x: x + 1, compiler_options=HIDES_GATHERS)
    assert add(jnp.ones(())) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_no_such_option"):
        jax.jit(lambda x: x + 1, compiler_options={"xla_gpu_no_such_option": 1})(jnp.ones(()))
