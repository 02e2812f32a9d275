"""The train step, lowered for GPUs: a repeated step must have the same bits as the first."""

import pathlib
import re

import jax
import pytest

from tests.small_runs import small_config
from zaya_jax.parallel.mesh import batch_sharding, data_mesh
from zaya_jax.pytree import abstract
from zaya_jax.train.compiled_programs import abstract_batch, compiled_step
from zaya_jax.train.step.state import abstract_state, make_setup

# The operation, its attributes, and its body up to the types of its operands.
SCATTER = re.compile(r'"stablehlo\.scatter"(.*?)\}\) : \(tensor<[^>]*x(\w+)>', re.DOTALL)


def _scatters(platform: str) -> list[tuple[str, str]]:
    config = small_config(run_folder=pathlib.Path("run"), corpus=pathlib.Path("corpus"))
    mesh, setup = data_mesh(jax.devices()[:1]), make_setup(config, 1, platform=platform)
    state = abstract_state(config, setup, mesh)
    batch = abstract(abstract_batch(config, config.data.batch_size), batch_sharding(mesh))
    lowered = compiled_step(state, setup=setup, mesh=mesh).trace(state, batch)
    return SCATTER.findall(lowered.lower(lowering_platforms=(platform,)).as_text())


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_no_sum_has_an_order_that_a_gpu_chooses(platform):
    """A scatter-add to places that may coincide becomes atomic additions, in whatever order they happen."""
    scatters = _scatters(platform)
    assert scatters
    for operation, dtype in scatters:
        is_sum_of_floats = "stablehlo.add" in operation and dtype.startswith(("f", "bf"))
        assert not is_sum_of_floats or "unique_indices = true" in operation, operation[:500]
