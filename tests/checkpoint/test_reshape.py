"""Rewritten checkpoints: rounded like numpy, complete or absent, and readable by all commands."""

import errno
import pathlib

import jax
import ml_dtypes
import numpy as np
import pytest
from small_runs import commit_folder, small_config

from zaya_jax import cli
from zaya_jax.checkpoint import (
    Checkpoints,
    PlainArray,
    Retention,
    SavedStep,
    StoredArrays,
    StoredWeights,
    check_init_from,
    chunk_name,
    damage_of,
    has_training,
    load_run,
    metadata_files,
    read_config,
    read_description,
    require_whole,
    reshape,
    restore,
)
from zaya_jax.checkpoint.format.description import StepDescription
from zaya_jax.files import durable
from zaya_jax.model.weights import abstract_variables

BFLOAT16, FLOAT32 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
DESCRIPTION = StepDescription(
    step=8, phase="", config={}, corpora={}, versions={}, num_processes=1, num_devices=1,
    written="2026-11-23T01:02:03+00:00",
)  # fmt: skip


def random_like(tree, seed: int):
    """Returns values from 1e-30 to 1e30; a few are halfway between two bfloat16 numbers."""
    numbers = np.random.default_rng(seed)

    def draw(x) -> np.ndarray:
        values = numbers.normal(size=x.shape) * 10.0 ** numbers.uniform(-30, 30, x.shape)
        values = values.astype(np.float32)
        half = (values.view(np.uint32) & 0xFFFF0000 | 0x8000).view(np.float32)
        return np.where(numbers.random(x.shape) < 0.1, half, values)

    return jax.tree.map(draw, tree)


@pytest.fixture(scope="module")
def weights():
    """Writes a run of a small network whose experts are chunked by layer and expert."""
    config = small_config(run_folder=pathlib.Path("unused"), corpus=pathlib.Path("unused"))
    return random_like(abstract_variables(config.model), 0)


@pytest.fixture(scope="module")
def run(weights, tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    state = jax.tree.map(jax.device_put, {"weights": weights, "training": {"step": np.int32(8)}})
    with Checkpoints(folder, retention=Retention(newest=9)) as checkpoints:
        checkpoints.save(4, **state)
        checkpoints.save(8, **state, about=DESCRIPTION)
    (folder / "config.json").write_text(small_config(run_folder=folder, corpus=folder).to_text())
    return folder


def rounded(tree):
    """Rounds to bfloat16 and back, except the balancing biases."""
    params = jax.tree.map(lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32), tree["params"])
    return tree | {"params": params}


def assert_same(ours, theirs) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), ours, theirs)


def test_bfloat16_and_back_is_rounded_like_numpy(run, weights, tmp_path):
    half, back = tmp_path / "half", tmp_path / "back"
    reshape(require_whole(run), half, dtype=BFLOAT16, weights_only=True)
    reshape(require_whole(half), back, dtype=FLOAT32, weights_only=True)
    assert damage_of(half, 8) is damage_of(back, 8) is None
    stored = StoredWeights(half)
    assert {stored.dtype(name) for name in stored.shapes if name != "router_bias.layers"} == {BFLOAT16}
    assert stored.dtype("router_bias.layers") == FLOAT32
    # Inference and `train.init_from` read float32, whatever type is stored.
    for folder in (half, back):
        assert_same(jax.device_get(load_run(folder).variables), rounded(weights))
    assert 0.45 < weight_bytes(half) / weight_bytes(back) < 0.55


def weight_bytes(folder: pathlib.Path) -> int:
    return sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*.*.*") if path.is_file())


def test_other_runs_start_from_weights_alone(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert zaya(f"{run}:4", out, "--weights-only", "--dtype=bfloat16") == 0
    assert capsys.readouterr().out.startswith(f"{out}: weights of step 4 of {run}, ")
    config = read_config(out)
    assert config.run_folder == str(out)
    assert config.model == read_config(run).model
    assert check_init_from(str(out), config.model) == SavedStep(str(out), 4)
    assert not has_training(out, 4)
    cli.main(["convert", str(out), str(tmp_path / "exported")])
    assert "values of step 4 in" in capsys.readouterr().out
    assert read_description(out, 4) is None


def test_a_whole_step_is_copied_bit_for_bit(run, weights, tmp_path):
    out = tmp_path / "out"
    out.mkdir()  # an empty folder may exist
    (run / "metrics.jsonl").write_text("{}\n")
    assert zaya(run, out) == 0
    assert (out / "metrics.jsonl").read_text() == "{}\n"
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), shapes)
    step = jax.ShapeDtypeStruct((), np.int32, sharding=device)
    restored = restore(out, 8, weights=like, training={"step": step})
    assert_same(jax.device_get(restored), (weights, {"step": np.asarray(8, np.int32)}))
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["8"]
    assert read_description(out, 8) == DESCRIPTION


def test_weights_without_optimizer_state_stay_so(run, tmp_path, capsys):
    reshape(require_whole(run), tmp_path / "half", dtype=None, weights_only=True)
    with pytest.raises(ValueError, match=r"step 8 of .*half has weights only; add --weights-only"):
        reshape(require_whole(tmp_path / "half"), tmp_path / "out", dtype=None, weights_only=False)


def test_only_one_chunk_is_in_memory_while_reshaping(run, tmp_path, monkeypatch):
    stored, sizes, read = StoredWeights(run), {}, StoredArrays.read

    def measured(arrays, name, index):
        part = read(arrays, name, index)
        sizes.setdefault(name, set()).add(part.size)
        return part

    monkeypatch.setattr(StoredArrays, "read", measured)
    reshape(require_whole(run), tmp_path / "out", dtype=BFLOAT16, weights_only=True)
    assert sizes == {name: {int(np.prod(stored.chunk(name)))} for name in stored.shapes}
    up = "params.layers.experts.gate_up_proj"
    assert sizes[up] == {int(np.prod(stored.shapes[up][2:]))}  # one expert


def test_partial_chunks_are_padded(tmp_path):
    """Seven rows in chunks of four, as in a converted folder."""
    table = np.arange(35, dtype=np.float32).reshape(7, 5) / 3
    array = PlainArray("params.table", (7, 5), (4, 5), FLOAT32)
    files = metadata_files(2, [array])
    for start in (0, 4):
        content = table[start : start + 4].tobytes()
        files[chunk_name(2, array, (start,))] = content.ljust(array.chunk_bytes, b"\0")
    for name, content in files.items():
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_bytes(content)
    commit_folder(tmp_path / "run/checkpoints/2", 2)
    (tmp_path / "run/config.json").write_text(small_config(run_folder=tmp_path, corpus=tmp_path).to_text())
    reshape(require_whole(tmp_path / "run"), tmp_path / "out", dtype=BFLOAT16, weights_only=True)
    stored = StoredWeights(tmp_path / "out")
    assert stored.chunk("params.table") == (4, 5)
    found = stored.read("params.table", (slice(None),))
    np.testing.assert_array_equal(found, table.astype(BFLOAT16), strict=True)


def test_a_full_disk_leaves_no_files(run, tmp_path, monkeypatch, capsys):
    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable, "sync_tree", fail)
    assert zaya(run, tmp_path / "out", "--weights-only") == 2
    assert capsys.readouterr().err == f"zaya: ckpt: {tmp_path}/out: No space left on device\n"
    assert list(tmp_path.iterdir()) == []


def zaya(*words) -> int:
    try:
        cli.main(["ckpt", "reshape", *map(str, words)])
    except SystemExit as leaving:
        return int(leaving.code or 0)
    return 0
