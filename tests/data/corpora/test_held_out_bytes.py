"""The bytes of a document are divided among its tokens without loss."""

import numpy as np
import pytest

from zaya_jax.data.corpora.held_out_bytes import divide_bytes


@pytest.mark.parametrize(
    ("spelled", "num_bytes", "expected"),
    [
        ([1, 2, 3], 6, [1, 2, 3, 0]),  # the tokens spell the text
        ([1, 1, 1, 1], 8, [2, 2, 2, 2, 0]),  # half of the text was squeezed out
        ([3, 3, 3], 3, [1, 1, 1, 0]),  # three bytes spell a space
        ([2, 2], 5, [2, 3, 0]),
        ([0, 0], 4, [0, 0, 4]),  # no token spells anything, so the end of the document has all bytes
        ([], 7, [7]),
        ([0, 5, 0], 10, [0, 10, 0, 0]),
    ],
)
def test_by_hand(spelled, num_bytes, expected):
    assert divide_bytes(np.array(spelled, np.int32), num_bytes).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_they_add_up_and_are_in_proportion(seed):
    numbers = np.random.default_rng(seed)
    spelled = numbers.integers(0, 9, numbers.integers(1, 3000))
    num_bytes = int(numbers.integers(1, 4 * spelled.sum() + 2))
    divided = divide_bytes(spelled, num_bytes).astype(np.int64)
    assert divided.sum() == num_bytes
    assert (divided >= 0).all()
    if spelled.sum():
        expected = np.cumsum(spelled) * num_bytes / spelled.sum()
        assert np.abs(np.cumsum(divided[:-1]) - expected).max() <= 0.5 + 1e-6
