"""Differences between two checkpoints, with numbers that can be checked by hand."""

import math
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from zaya_jax import cli
from zaya_jax.checkpoint import Checkpoints, Retention, StoredArrays, compare, require_whole
from zaya_jax.errors import DamagedError

UP = np.arange(1, 25, dtype=np.float32).reshape(2, 3, 4)
TABLE = np.linspace(-1, 1, 35, dtype=np.float32).reshape(7, 5)


def write(run: pathlib.Path, step: int, *, up=UP, table=TABLE, moment=TABLE, more=None) -> None:
    params = {"layers": {"experts": {"up": up}}, "table": table} | (more or {})
    training = {"step": np.int32(step), "key": jax.random.key(3), "state": (None, {"mu": moment})}
    state = jax.tree.map(jax.device_put, {"weights": {"params": params}, "training": training})
    with Checkpoints(run, retention=Retention(newest=9)) as checkpoints:
        checkpoints.save(step, **state)


def compared(run: pathlib.Path, ours: int, theirs: int, item: str = "weights"):
    return compare(*(StoredArrays(require_whole(run, step), item) for step in (ours, theirs)))


def with_values(array: np.ndarray, values: dict) -> np.ndarray:
    changed = array.copy()
    for index, value in values.items():
        changed[index] = value
    return changed


def test_equal_checkpoints_have_no_difference(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2)
    found = compared(tmp_path, 1, 2)
    assert found.is_equal
    assert {each.name for each in found.differences} == {"params.layers.experts.up", "params.table"}
    training = compared(tmp_path, 1, 2, "training")
    assert [each.name for each in training.differences if not each.is_none] == ["step"]
    assert {each.name for each in training.differences} == {"step", "key", "state.1.mu"}


@pytest.mark.parametrize(
    ("values", "num_values", "absolute", "relative"),
    [
        ({(0, 0): np.nextafter(np.float32(-1), np.float32(0))}, 1, 2**-24, 2**-24),
        ({(0, 0): -2.0, (6, 4): 1.25}, 2, 1.0, 0.5),
        ({(0, 0): 1.0}, 1, 2.0, 2.0),
        ({(0, 0): math.nan}, 1, math.inf, math.inf),
        ({(0, 0): math.inf}, 1, math.inf, math.inf),
        ({(3, 2): -0.0}, 1, 0.0, 0.0),
    ],
)
def test_differences_are_those_of_the_values(tmp_path, values, num_values, absolute, relative):
    """The table contains values from -1 to 1, with 0 in the middle."""
    table = with_values(TABLE, {(3, 2): 0.0})
    write(tmp_path, 1, table=table)
    write(tmp_path, 2, table=with_values(table, values))
    first, second = compared(tmp_path, 1, 2).differences
    assert (first.name, first.num_values) == ("params.table", num_values)
    assert (first.absolute, first.relative) == (absolute, relative)
    assert second.is_none
    assert not compared(tmp_path, 1, 2).is_equal


def test_nan_equals_nan(tmp_path):
    for step in (1, 2):
        write(tmp_path, step, table=with_values(TABLE, {(0, 0): math.nan, (1, 1): -math.inf}))
    assert compared(tmp_path, 1, 2).is_equal


def test_types_shapes_and_names_that_differ(tmp_path):
    """bfloat16 has eight significant bits: from 512 to 1024 the last one is 4, so that rounding changes a
    value by at most 2.
    """
    up = with_values(UP + 1000, {(0, 0, 0): math.nan})
    write(tmp_path, 1, up=up)
    write(tmp_path, 2, up=up.astype(ml_dtypes.bfloat16), table=TABLE[:6], more={"bias": TABLE})
    found = compared(tmp_path, 1, 2)
    assert (found.only_first, found.only_second) == ((), ("params.bias",))
    assert found.shapes == {"params.table": ((7, 5), (6, 5))}
    (only,) = found.differences
    assert only.dtypes == ("float32", "bfloat16")
    rounding = np.nan_to_num(np.abs(up.astype(ml_dtypes.bfloat16).astype(np.float32) - up))
    assert only.absolute == rounding.max() == 2
    assert only.num_values == np.count_nonzero(rounding)
    assert not found.is_equal


def test_the_largest_difference_comes_first(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 2, up=UP + 2, table=TABLE * 1.5)
    names = [each.name for each in compared(tmp_path, 1, 2).differences]
    assert names == ["params.layers.experts.up", "params.table"]  # 2/3 for the smallest, 1, and 1/3
    write(tmp_path, 3, up=UP + 0.25, table=TABLE * 1.5)
    assert [each.name for each in compared(tmp_path, 1, 3).differences] == names[::-1]


def test_only_one_chunk_is_in_memory(tmp_path, monkeypatch):
    """Weights are chunked by layer and expert, optimizer arrays by size."""
    monkeypatch.setattr("zaya_jax.checkpoint.steps.CHUNK_BYTES", 100)
    for step in (1, 2):
        write(tmp_path, step)
    sizes, read = {}, StoredArrays.read

    def measured(stored, name, index):
        part = read(stored, name, index)
        sizes.setdefault(name, set()).add(part.nbytes)
        return part

    monkeypatch.setattr(StoredArrays, "read", measured)
    compared(tmp_path, 1, 2)
    compared(tmp_path, 1, 2, "training")
    assert sizes["params.layers.experts.up"] == {16}
    assert max(sizes["params.table"]) <= 100
    assert max(sizes["state.1.mu"]) <= 100


def test_a_file_that_is_truncated_between_opening_and_reading_is_an_error(tmp_path):
    write(tmp_path, 1)
    stored = StoredArrays(require_whole(tmp_path, 1), "weights")
    files = [path for path in stored.folder.rglob("d/*") if path.is_file()]
    assert files
    for path in files:
        path.write_bytes(b"")
    with pytest.raises(DamagedError, match="table cannot be read"):
        stored.read("params.table", (slice(None), slice(None)))


def zaya(*words) -> int:
    try:
        cli.main(["ckpt", "diff", *map(str, words)])
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0


def test_the_command_has_the_exit_codes_of_diff(tmp_path, capsys):
    run = tmp_path / "a:1"
    write(run, 1, moment=TABLE * 2)
    write(run, 2)
    assert zaya(f"{run}:1", run) == 0
    assert capsys.readouterr().out == "weights: 2 of 2 arrays are bitwise equal\n"
    assert zaya(f"{run}:1", f"{run}:2", "--training") == 3
    out = capsys.readouterr().out
    assert out.endswith("training: 1 of 3 arrays are bitwise equal\n")
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if line[:1] == "│"]
    assert rows == [["state.1.mu", "float32", "34", "1", "0.5"], ["step", "int32", "1", "1", "0.5"]]
