"""Files that XLA:ROCm writes for one compilation."""

import os

import pytest

from zaya_jax.plan.rocm.code_objects import files_in_order


@pytest.mark.parametrize("names", [["a.hsaco", "b.hsaco", "c.hsaco"], ["c.hsaco", "a.hsaco", "b.hsaco"]])
def test_files_are_in_the_order_of_their_writing(tmp_path, names):
    """XLA numbers its files at random; of two kernels with one name, the program uses the later one."""
    for seconds, name in enumerate(names):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, ns=(0, 10**9 + seconds))
    (tmp_path / "d.ll").touch()
    assert [path.name for path in files_in_order(tmp_path, "*.hsaco")] == names
