"""ZAYA1-8B's full size on a small machine: random weights become a run and come back, in bounded memory.

`pytest -n 0 -s -m campaign tests/convert/test_full_size.py` prints size, time and memory of each step.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from zaya_jax.config import ModelConfig
from zaya_jax.convert.companion_files import of_tokenizer
from zaya_jax.convert.output_files import pytorch_files
from zaya_jax.convert.pytorch.folder import stored_tensors
from zaya_jax.convert.pytorch.layouts import ROUTER_BIAS, WeightSlice
from zaya_jax.convert.quantized.codecs import CODECS
from zaya_jax.convert.stream import NoProgress, check_checksums, write_folder
from zaya_jax.files.durable import CHECKSUMS, sync, sync_tree
from zaya_jax.model.weights import count_parameters

CONVERT = (sys.executable, "-m", "zaya_jax.cli", "convert")
BYTES_OF_A_LAYER = 450e6
"""In bfloat16; with the original, the run and what comes back, a folder holds each three times."""


@dataclasses.dataclass(frozen=True)
class RandomWeights:
    """Random finite bfloat16 values; each slice is a deterministic function of its place."""

    config: ModelConfig

    def dtype(self, path: str) -> np.dtype:
        """Float32 for the balancing biases and bfloat16 for the rest, as released."""
        return np.dtype(np.float32 if path == ROUTER_BIAS else ml_dtypes.bfloat16)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """Returns a slice, whose values depend only on its place, so that every reader gets the same."""
        rng = np.random.default_rng([zlib.crc32(weight_slice.path.encode()), *weight_slice.start])
        if weight_slice.path == ROUTER_BIAS:
            return rng.uniform(-0.1, 0.1, weight_slice.shape).astype(np.float32)
        # Clearing the highest exponent bit makes all values finite, with magnitude below 2.
        bits = np.frombuffer(rng.bytes(2 * weight_slice.size), np.uint16) & 0xBFFF
        return bits.view(ml_dtypes.bfloat16).reshape(weight_slice.shape)

    def identity(self) -> list[Any]:
        """The network, which determines all values."""
        return [dataclasses.asdict(self.config)]


def timed(command: tuple[str, ...], source: pathlib.Path, target: pathlib.Path) -> int:
    """Runs a command until its files are on the disk, prints its figures, and returns its peak of bytes."""
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    evict(source)
    start = time.monotonic()
    process = subprocess.Popen([*command, str(source), str(target)])
    # wait4 returns the resource usage of exactly this child.
    _, status, usage = os.wait4(process.pid, 0)
    # Popen has not waited itself: without a code it would take the child for running, and warn.
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    # `cp` does not sync what it writes: without this it would seem faster than the disk.
    sync_tree(target)
    seconds = time.monotonic() - start
    peak = usage.ru_maxrss * 1024  # Linux reports KiB
    print(
        f"{source.name} to {target.name}: {size / 1e9:.2f} GB in {seconds:.1f} s, "
        f"{size / 1e9 / seconds:.2f} GB/s, {usage.ru_utime + usage.ru_stime:.1f} s of CPU, "
        f"peak memory {peak / 1e9:.2f} GB"
    )
    return peak


def evict(folder: pathlib.Path) -> None:
    """Drops a folder's files from the page cache, so that reading them reads the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            sync(file)  # dirty pages cannot be dropped
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def weight_checksums(folder: pathlib.Path) -> list[str]:
    """Lines of SHA-256 sums of all shards."""
    lines = (folder / CHECKSUMS).read_text().splitlines()
    return [line for line in lines if line.endswith(".safetensors")]


@pytest.mark.campaign
@pytest.mark.parametrize("num_layers", [12, 40])
def test_random_weights_come_back_unchanged(tmp_path, num_layers):
    if shutil.disk_usage(tmp_path).free < 3.2 * num_layers * BYTES_OF_A_LAYER:
        pytest.skip(f"{num_layers} layers need more disk space")
    config = ModelConfig(num_hidden_layers=num_layers)
    native, copy, run, back = (tmp_path / name for name in ("native", "copy", "run", "back"))
    source = RandomWeights(config)
    companions = of_tokenizer(None, config, story=("Random weights.",))
    write_folder(source, pytorch_files(source, "native", companions, dtype=None), native, NoProgress())
    # A plain copy moves the same bytes, and shows what the disk allows.
    timed(("cp", "-r"), native, copy)
    shutil.rmtree(copy)
    peaks = [timed(CONVERT, native, run), timed(CONVERT, run, back)]
    # Far below the weights, whatever their number: a conversion holds a few slices at a time.
    assert max(peaks) < 1.5e9
    values = sum(int(np.prod(tensor.shape)) for tensor in stored_tensors(back).values())
    assert values == count_parameters(config) + num_layers * config.num_router_classes
    # The checksums must be those of the disk, and not of the pages that the conversion has left in memory.
    evict(back)
    assert not check_checksums(back)
    assert weight_checksums(native) == weight_checksums(back)
    shutil.rmtree(tmp_path)


@pytest.mark.campaign
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("num_layers", [2, 40])
def test_random_weights_are_quantized(tmp_path, num_layers, name):
    if shutil.disk_usage(tmp_path).free < 1.8 * num_layers * BYTES_OF_A_LAYER + 3e9:
        pytest.skip(f"{num_layers} layers need more disk space")
    native, quantized = tmp_path / "native", tmp_path / name
    source = RandomWeights(ModelConfig(num_hidden_layers=num_layers))
    companions = of_tokenizer(None, source.config, story=("Random weights.",))
    write_folder(source, pytorch_files(source, "native", companions, dtype=None), native, NoProgress())
    # It includes reading both folders again for the errors by layer.
    assert timed((*CONVERT, f"--quantize={name}"), native, quantized) < 1.5e9
    weights = sum(each.size for each in stored_tensors(quantized).values())
    bits = {"fp8": 8, "int8": 8, "mxfp4": 4.25}[name]
    experts = 16 * 3 * 2048 * 2048 * num_layers
    scales = 0 if name == "mxfp4" else 16 * 3 * 2048 * 4 * num_layers
    rest = 2 * (count_parameters(source.config) - experts) + 4 * num_layers * 17
    assert weights == experts * bits / 8 + scales + rest
    shutil.rmtree(tmp_path)
