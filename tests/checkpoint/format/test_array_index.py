"""The index of an item has the entries that Orbax's own merge gives it, and incomplete ones are errors."""

import asyncio
import gc
import pathlib
import sys
import threading
from collections.abc import Callable

import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest
import tensorstore as ts

from zaya_jax.checkpoint.format import array_index
from zaya_jax.checkpoint.format.array_index import PER_PROCESS, merge_indexes, shapes_agree
from zaya_jax.checkpoint.steps import StepWriter
from zaya_jax.checkpoint.storage_errors import silence_threads

ARRAYS = {"layers.up": jnp.ones((2, 3)), "step": jnp.int32(7)}
SHAPES = "weights/array_metadatas/process_"


def index_of(folder: pathlib.Path) -> ts.KvStore:
    return ts.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()


def entries(folder: pathlib.Path) -> dict[bytes, bytes]:
    index = index_of(folder)
    return {name: index[name] for name in index.list().result()}


def written(folder: pathlib.Path, *, processes: int) -> tuple[StepWriter, list]:
    """Writes a step as several processes do: the first one with all arrays, the others with a part each."""
    writer = StepWriter(folder, 1, None)
    writer.begin({"weights": ocp.args.StandardSave(ARRAYS)})
    described = [writer.finish()]
    for process in range(1, processes):
        write_as(process, folder / "weights", **{f"layers.up/{process}.0": f"part {process}"})
        index = f"weights/{PER_PROCESS}{process}/manifest.ocdbt"
        size = (folder / index).stat().st_size
        described.append({f"{SHAPES}{process}": described[0][f"{SHAPES}0"], index: {"bytes": size}})
    return writer, described


def write_as(process: int, item: pathlib.Path, **values: str) -> None:
    index = index_of(item / f"{PER_PROCESS}{process}")
    for name, value in values.items():
        index[name] = value


def test_the_index_equals_that_of_orbax(tmp_path):
    """Entries refer to the files of each process, and have its values."""
    (writer, described), (other, _) = (written(tmp_path / name, processes=5) for name in ("ours", "orbax"))
    writer.merge(described)
    (handler,) = other._handlers.values()
    handler.finalize(tmp_path / "orbax/weights")
    ours, theirs = (entries(tmp_path / name / "weights") for name in ("ours", "orbax"))
    assert ours == theirs
    assert ours[b"layers.up/3.0"] == b"part 3"
    assert len(ours) == 8  # two descriptions, two parts of process 0 and one of each other process


def hide_folder(index: pathlib.Path) -> Callable[[], object]:
    """Hides a process's folder; returns what makes it appear."""
    hidden = index.parents[2] / "hidden"
    index.parent.rename(hidden)
    return lambda: hidden.rename(index.parent)


def hide_file(index: pathlib.Path) -> Callable[[], object]:
    """Hides the file that makes a folder an index."""
    hidden = index.with_name("hidden")
    index.rename(hidden)
    return lambda: hidden.rename(index)


def show_a_part(index: pathlib.Path) -> Callable[[], object]:
    """Cuts the file that makes a folder an index."""
    whole = index.read_bytes()
    index.write_bytes(whole[:-1])
    return lambda: index.write_bytes(whole)


@pytest.mark.parametrize("hide", [hide_folder, hide_file, show_a_part])
def test_folders_that_are_visible_late_are_merged(tmp_path, hide):
    """Without the wait the merge would skip a folder without an error, and its parts would be zeros."""
    writer, described = written(tmp_path, processes=4)
    show = hide(tmp_path / f"weights/{PER_PROCESS}2/manifest.ocdbt")
    later = threading.Timer(0.5, show)
    later.start()
    writer.merge(described)
    later.join()
    assert entries(tmp_path / "weights")[b"layers.up/2.0"] == b"part 2"


@pytest.mark.parametrize("hide", [hide_folder, hide_file, show_a_part])
def test_folders_that_stay_invisible_are_an_error(tmp_path, monkeypatch, hide):
    monkeypatch.setattr(array_index, "VISIBLE_SECONDS", 0.3)
    writer, described = written(tmp_path, processes=4)
    hide(tmp_path / f"weights/{PER_PROCESS}2/manifest.ocdbt")
    with pytest.raises(FileNotFoundError, match=r"does not see it 0\.3 s after.*ocdbt\.process_2"):
        writer.merge(described)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("new/0.0", "1 of 3 arrays are incomplete; the first, new, has no description"),
        ("new/.zarray", "1 of 3 arrays are incomplete; the first, new, has no parts"),
    ],
)
def test_incomplete_arrays_are_an_error(tmp_path, extra, message):
    """TensorStore would read missing parts as zeros."""
    written(tmp_path, processes=1)
    write_as(1, tmp_path / "weights", **{extra: "value"})
    with pytest.raises(ValueError, match=message):
        asyncio.run(merge_indexes(tmp_path / "weights"))


def test_different_shapes_are_an_error_that_orbax_explains(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    silence_threads()  # Orbax abandons the merge
    writer, described = written(tmp_path, processes=2)
    assert shapes_agree("weights", described)
    noted = tmp_path / SHAPES
    text = noted.with_name("process_0").read_text()
    assert '"chunk_shape": [2, 3]' in text
    noted.with_name("process_1").write_text(text.replace("[2, 3]", "[2, 9]"))
    described[1][f"{SHAPES}1"] = {"bytes": 1, "xxh3_128": "different"}
    assert not shapes_agree("weights", described)
    assert shapes_agree("training", described)
    with pytest.raises(ValueError, match=r"layers\.up"):
        writer.merge(described)
    gc.collect()
