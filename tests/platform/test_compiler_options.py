"""What the compiler is told: options that this jax's XLA knows."""

import jax
import jax.numpy as jnp
import pytest

from zaya_jax.platform.compiler import HIDES_GATHERS, known


def test_of_the_options_for_gathers_this_xla_gets_those_that_it_knows():
    """A GPU's options parse on CPUs too. Pipelining has one of two names, by the version."""
    found = known(HIDES_GATHERS | {"xla_gpu_no_such_option": 1})
    pipelining = {name for name in found if "all_gather" in name}
    assert len(pipelining) == 1
    assert set(found) - pipelining == {name for name in HIDES_GATHERS if "all_gather" not in name}
    add = jax.jit(lambda x: x + 1, compiler_options=found)
    assert add(jnp.ones(())) == 2


def test_a_wrong_value_is_no_unknown_name():
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_gpu_autotune_level"):
        known({"xla_gpu_autotune_level": "highest"})
