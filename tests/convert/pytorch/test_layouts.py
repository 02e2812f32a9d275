"""Slices of tensors and error messages about tensors, by hand."""

import pytest

from zaya_jax.convert.pytorch.layouts import check_shapes, rows_per_slice


def test_rows_per_slice():
    """Slices have at most 2^24 values, 64 MiB of float32, and about equal sizes; rows are not split."""
    assert [rows_per_slice((rows, 2**23)) for rows in (1, 2, 3, 5, 8)] == [1, 2, 2, 2, 2]
    assert rows_per_slice((9, 2**22)) == 3
    assert rows_per_slice((3, 2**26)) == 1


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (1, "1 tensor missing: t0 [2]"),
        (5, "5 tensors missing: t0 [2], t1 [2], t2 [2], t3 [2], t4 [2]"),
        (6, "6 tensors missing: t0 [2], t1 [2], t2 [2], t3 [2], t4 [2], ..."),
    ],
)
def test_up_to_five_wrong_tensors_are_named(count, sentence):
    with pytest.raises(ValueError, match="missing") as error:
        check_shapes({}, {f"t{i}": (2,) for i in range(count)}, "tensor")
    assert str(error.value) == sentence
