"""Any change of any file of a checkpoint is detected, and an older step is used instead."""

import json
import os
import pathlib
import random
import shutil
import threading

import jax
import numpy as np
import pytest

from zaya_jax.checkpoint import Checkpoints, Retention, all_damage, damage_of, newest_step
from zaya_jax.checkpoint.format import manifest
from zaya_jax.checkpoint.format.manifest import manifest_text

STATE = {
    "weights": {"params": {"layers": {"up": np.arange(24.0).reshape(2, 3, 4)}, "table": np.ones((7, 5))}},
    "training": {"step": np.int32(0), "moments": np.zeros((40, 30))},
}


def state_of(step: int) -> dict:
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x + step)), STATE)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """Writes a run with different arrays in steps 4 and 8."""
    folder = tmp_path_factory.mktemp("run")
    with Checkpoints(folder, retention=Retention(newest=2)) as checkpoints:
        for step in (4, 8):
            checkpoints.save(step, **state_of(step))
    return folder


@pytest.fixture
def copy(saved, tmp_path) -> pathlib.Path:
    return shutil.copytree(saved, tmp_path / "run")


def files_of(step: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(step)) for path in step.rglob("*") if path.is_file())


def flips(content: bytes, count: int, seed: int):
    """Yields copies of the content with one flipped bit: `count` random ones, or all."""
    bits = range(8 * len(content))
    for bit in random.Random(seed).sample(bits, min(count, len(bits))):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        yield bytes(flipped)


@pytest.mark.parametrize("names", [(), ("a",), ("b/c", 'q"},\n   {"', "ä\\n", "line\nbreak", ", ")])
def test_a_manifest_is_json_with_an_indent(names):
    """The bytes of a manifest are part of the format: its hash identifies a checkpoint."""
    files = {name: {"bytes": number, "xxh3_128": f"{number:032x}"} for number, name in enumerate(names)}
    assert manifest_text(7, files) == json.dumps({"step": 7, "files": files}, indent=1) + "\n"


def test_intact_checkpoints_have_no_damage(saved):
    assert damage_of(saved, 4) is damage_of(saved, 8) is None
    assert {"manifest.json", "committed"} <= set(files_of(saved / "checkpoints/8"))


def test_threads_find_what_one_finds_in_the_same_order(copy, monkeypatch):
    """Threads read large checkpoints; they end with the first damage, if the caller wants no more."""
    names = [name for name in files_of(copy / "checkpoints/8") if "/d/" in name]
    for name in names[::2]:
        path = copy / "checkpoints/8" / name
        path.write_bytes(bytes(path.stat().st_size))
    (copy / "checkpoints/8" / names[1]).unlink()
    expected = list(all_damage(copy, 8))
    assert len(expected) == len(names[::2]) + 1
    before = set(threading.enumerate())
    monkeypatch.setattr(manifest, "MIN_BYTES_FOR_THREADS", 0)
    assert list(all_damage(copy, 8)) == expected
    assert damage_of(copy, 8) == expected[0]
    assert set(threading.enumerate()) <= before


def test_each_flipped_bit_of_each_file_is_detected(copy):
    folder = copy / "checkpoints/8"
    for seed, name in enumerate(files_of(folder)):
        whole = (folder / name).read_bytes()
        for content in flips(whole, 50, seed):
            (folder / name).write_bytes(content)
            assert damage_of(copy, 8), name
        (folder / name).write_bytes(whole)
    assert damage_of(copy, 8) is None


def test_any_damage_of_a_file_is_detected_and_the_older_step_is_used(copy):
    folder, older = copy / "checkpoints/8", copy / "checkpoints/4"
    names = files_of(folder)
    for name in names:
        whole, path = (folder / name).read_bytes(), folder / name
        others = [(folder / other).read_bytes() for other in names]
        stale = (older / name).read_bytes() if (older / name).exists() else b""
        zeroed = bytes(min(4096, len(whole))) + whole[4096:]
        changes = {whole[: len(whole) // 2], whole + b"\0", zeroed, stale, b"", *others} - {whole}
        for content in changes:
            path.write_bytes(content)
            assert newest_step(copy) == 4, name
        path.unlink()
        assert newest_step(copy) == 4, name
        path.write_bytes(whole)
    assert newest_step(copy) == 8


@pytest.mark.parametrize("what", ["file", "pipe", "link", "link to a folder", "another step"])
def test_replaced_files_and_links_are_detected(copy, what):
    folder = copy / "checkpoints/8"
    if what == "file":
        (folder / "weights/more").write_text("")
    elif what == "pipe":  # reading it would block forever
        (folder / "weights/_METADATA").unlink()
        os.mkfifo(folder / "weights/_METADATA")
    elif what == "link":
        (folder / "weights/_METADATA").unlink()
        (folder / "weights/_METADATA").symlink_to(copy / "checkpoints/4/weights/_METADATA")
    elif what == "link to a folder":
        (folder / "weights").rename(copy / "elsewhere")
        (folder / "weights").symlink_to(copy / "elsewhere")
    else:
        shutil.rmtree(folder)
        shutil.copytree(copy / "checkpoints/4", folder)
    assert newest_step(copy) == 4
