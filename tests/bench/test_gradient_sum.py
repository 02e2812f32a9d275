"""What rounding at each hop does to a sum: by hand, and as an outside audit found it."""

import io

import numpy as np
import pytest
from rich.console import Console

from zaya_jax.bench import gradient_sum
from zaya_jax.bench.gradient_sum import BFLOAT16, FLOAT32, WAYS, by_node, lost_share, ring


def test_a_ring_by_hand():
    """In bfloat16, of 8 bits, 256 + 1 is 256: the other 768 ones are lost."""
    ones = np.ones((1024, 3), BFLOAT16)
    assert ring(ones, BFLOAT16).tolist() == [256.0] * 3
    assert ring(ones, FLOAT32).tolist() == [1024.0] * 3
    assert by_node(ones, BFLOAT16, BFLOAT16).tolist() == [1024.0] * 3  # 128 times 8: both are exact


@pytest.mark.parametrize(
    ("way", "noise", "least", "most"),
    [
        # The audit's figures, rounded there: 64% and 34%, 3 to 4%; by node 6.4, 1.5 and 1.1%.
        (0, 0, 0.60, 0.68), (0, 1, 0.30, 0.38), (0, 10, 0.025, 0.045), (0, 100, 0.025, 0.045),
        (1, 0, 0.05, 0.08), (1, 1, 0.01, 0.02), (1, 10, 0.008, 0.015),
        (3, 0, 0, 1e-4), (3, 1, 0, 1e-4), (3, 100, 0, 1e-4),
        # Each node's sum is rounded once, by up to 1 of 512, of which little is left in that of 128 nodes.
        (4, 0, 0, 1e-6), (4, 1, 1e-5, 1e-3), (4, 100, 1e-4, 3e-3),
    ],
)  # fmt: skip
def test_what_is_lost(way, noise, least, most):
    assert least <= lost_share(WAYS[way], float(noise)) <= most


def test_the_table_and_what_float32_costs(monkeypatch):
    monkeypatch.setattr(gradient_sum, "NUM_ELEMENTS", 64)
    out = io.StringIO()
    gradient_sum.run(Console(file=out, width=100))
    said = " ".join(out.getvalue().split())
    assert all(way.name in said for way in WAYS)
    # 1,024 GPUs: 9.68e9 values with padding, 4 bytes instead of 2; each NIC sends an eighth of 127/128.
    assert "38.7 GB a GPU and step, in bfloat16 19.4" in said
    assert "48.0 ms more of the network and 37.8 ms more of the links" in said
