"""The tokens of a sequence that each device has, and the amount of work for them."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.flash_attention.spans import block_spans
from zaya_jax.parallel.mesh import zigzag_order

EVERYTHING = np.iinfo(np.int32).max


@settings(max_examples=20, deadline=None)
@given(ranks=st.integers(1, 9), size=st.integers(1, 5))
def test_each_device_has_an_early_and_a_late_chunk(ranks, size):
    order = zigzag_order(2 * ranks * size, ranks).reshape(ranks, -1)
    for rank, actual in enumerate(order.tolist()):
        late = 2 * ranks - 1 - rank
        assert actual == [*range(rank * size, (rank + 1) * size), *range(late * size, (late + 1) * size)]


@pytest.mark.parametrize("ranks", [2, 8])
def test_all_devices_visit_the_same_number_of_blocks(ranks):
    """Blocks are counted as in the forward kernel: chunks of queries with all earlier keys."""
    size, blocks = 1024, (128, 32)

    def visited(number):
        limits = jnp.array([number * size, EVERYTHING])
        of_queries, _ = block_spans(size, 2 * ranks * size, *blocks, limits, None, None)
        return int(jnp.sum(of_queries[..., 3] - of_queries[..., 0]))

    actual = [visited(rank) + visited(2 * ranks - 1 - rank) for rank in range(ranks)]
    assert max(actual) <= 1.02 * sum(actual) / ranks
    assert (
        visited(2 * ranks - 1) > 1.5 * sum(actual) / ranks / 2
    )  # a late chunk alone is more work than an even share
