"""Weights of a checkpoint in parts: read from what Orbax wrote, and written for Orbax to read."""

import os
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest

from zaya_jax.checkpoint import (
    Checkpoints,
    PlainArray,
    Retention,
    StoredWeights,
    chunk_name,
    has_training,
    metadata_files,
    restore_weights,
)

TREE = {
    "params": {
        "table": np.arange(35, dtype=np.float32).reshape(7, 5),
        "layers": {"experts": {"up": np.arange(24, dtype=np.float32).reshape(2, 3, 4)}},
    },
    "router_bias": {"layers": np.arange(6, dtype=np.float32).reshape(2, 3)},
}


@pytest.fixture
def saved(tmp_path) -> pathlib.Path:
    with Checkpoints(tmp_path, retention=Retention(newest=1)) as checkpoints:
        for step in (3, 5):
            checkpoints.save(
                step, weights=jax.tree.map(jax.device_put, TREE), training={"step": np.int32(step)}
            )
    return tmp_path


def test_parts_of_what_orbax_wrote(saved):
    stored = StoredWeights(saved)
    assert stored.step == 5
    assert stored.shapes == {
        "params.table": (7, 5), "params.layers.experts.up": (2, 3, 4), "router_bias.layers": (2, 3)
    }  # fmt: skip
    assert stored.dtype("params.table") == np.float32
    up = stored.read("params.layers.experts.up", (1, 2))
    np.testing.assert_array_equal(up, TREE["params"]["layers"]["experts"]["up"][1, 2])
    np.testing.assert_array_equal(stored.read("params.table", (slice(2, 4),)), TREE["params"]["table"][2:4])
    # The table fits into one chunk; the others are chunked by layer and by expert.
    assert stored.chunk_bytes() == 4 * (35 + 4 + 3)


def test_another_checkpoint_has_another_identity(saved):
    before = StoredWeights(saved).identity()
    assert StoredWeights(saved).identity() == before
    os.utime(saved / "checkpoints/5/weights/_METADATA", ns=(0, 0))
    assert StoredWeights(saved).identity() != before
    with Checkpoints(saved, retention=Retention(newest=1)) as checkpoints:
        checkpoints.save(7, weights=jax.tree.map(jax.device_put, TREE), training={"step": np.int32(7)})
    assert StoredWeights(saved).identity() != before


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_orbax_restores_what_is_written_without_it(tmp_path, dtype):
    """Two chunks for seven rows: the second is padded to the size of the first."""
    table = TREE["params"]["table"].astype(dtype)
    up = TREE["params"]["layers"]["experts"]["up"].astype(dtype)
    arrays = [
        PlainArray("params.table", (7, 5), (4, 5), np.dtype(dtype)),
        PlainArray("params.layers.experts.up", (2, 3, 4), (1, 1, 4), np.dtype(dtype)),
    ]
    files = metadata_files(2, arrays)
    for start in (0, 4):
        files[chunk_name(2, arrays[0], (start,))] = table[start : start + 4].tobytes()
    for start in np.ndindex(2, 3):
        files[chunk_name(2, arrays[1], start)] = up[start].tobytes()
    last = "checkpoints/2/weights/params.table/1.0"
    files[last] = files[last].ljust(arrays[0].chunk_bytes, b"\0")
    assert len(files) == 2 + 2 + 2 + 6
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    expected = {"params": {"table": table, "layers": {"experts": {"up": up}}}}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), expected)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), like)
    restored = restore_weights(tmp_path, 2, like)
    assert not has_training(tmp_path, 2)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), restored, expected)


def test_a_step_is_flushed_to_disk_before_it_is_renamed(tmp_path, monkeypatch):
    """Orbax itself does not flush the files that describe its arrays."""
    log, fsync = [], os.fsync
    whole = tmp_path / "checkpoints/3"

    def record(descriptor):
        log.append((os.readlink(f"/proc/self/fd/{descriptor}"), whole.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    with Checkpoints(tmp_path, retention=Retention(newest=1)) as checkpoints:
        checkpoints.save(3, weights=jax.tree.map(jax.device_put, TREE), training={"step": np.int32(3)})
    paths = [pathlib.Path(path) for path, there in log if not there]
    before = {path.relative_to(whole.parent) for path in paths if path.is_relative_to(whole.parent)}
    written = {path.relative_to(whole) for path in whole.rglob("*")}
    asides = {pathlib.Path(str(path).removesuffix(".partial")) for path in before}
    assert {pathlib.Path(*path.parts[1:]) for path in asides} >= written
    assert pathlib.Path("weights/_METADATA") in written
    assert log[-1] == (str(whole.parent), True)
