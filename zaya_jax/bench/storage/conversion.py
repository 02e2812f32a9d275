"""Conversion of ZAYA1-8B on a small machine: random weights of its full size, to a run and back.

`python -m zaya_jax.bench.storage.conversion FOLDER` needs 54 GB of disk space in FOLDER, with `--layers 12`
only 17 GB. The guide to PyTorch weights in the documentation reports the results.
"""

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from zaya_jax.config import ModelConfig
from zaya_jax.convert.companion_files import of_tokenizer
from zaya_jax.convert.output_files import pytorch_files
from zaya_jax.convert.pytorch.folder import stored_tensors
from zaya_jax.convert.pytorch.layouts import ROUTER_BIAS, WeightSlice
from zaya_jax.convert.stream import NoProgress, check_checksums, write_folder
from zaya_jax.errors import UserError
from zaya_jax.files.durable import CHECKSUMS, sync, sync_tree
from zaya_jax.model.weights import count_parameters
from zaya_jax.options import Parser
from zaya_jax.text_tables import name_column, number_column


@dataclasses.dataclass(frozen=True)
class RandomWeights:
    """Random finite bfloat16 values; each slice is a deterministic function of its place."""

    config: ModelConfig

    def dtype(self, path: str) -> np.dtype:
        """Float32 for the balancing biases and bfloat16 for the rest, as released."""
        return np.dtype(np.float32 if path == ROUTER_BIAS else ml_dtypes.bfloat16)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """Returns a slice, whose values depend only on its place."""
        # The seed is the place of the slice, so that every reader gets the same values.
        rng = np.random.default_rng([zlib.crc32(weight_slice.path.encode()), *weight_slice.start])
        if weight_slice.path == ROUTER_BIAS:
            return rng.uniform(-0.1, 0.1, weight_slice.shape).astype(np.float32)
        # Clearing the highest exponent bit makes all values finite, with magnitude below 2.
        bits = np.frombuffer(rng.bytes(2 * weight_slice.size), np.uint16) & 0xBFFF
        return bits.view(ml_dtypes.bfloat16).reshape(weight_slice.shape)

    def identity(self) -> list[Any]:
        """The network, which determines all values."""
        return [dataclasses.asdict(self.config)]


@dataclasses.dataclass(frozen=True)
class Measured:
    """One step of the benchmark.

    Attributes:
      name: name of the step.
      size: bytes moved.
      seconds: time until the files are on the disk.
      busy: CPU seconds over all cores.
      peak: peak memory of the process in bytes, including shared libraries.
    """

    name: str
    size: int
    seconds: float
    busy: float
    peak: int


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, prints the results, and removes all files."""
    parser = Parser(
        "bench convert",
        "Convert random weights of ZAYA1-8B's size to a run and back.",
        ("python -m zaya_jax.bench.storage.conversion /big/disk/new_folder",),
    )
    parser.add_argument("folder", help="new folder, removed at the end")
    parser.add_argument("--layers", type=int, default=40, help="number of layers (default: %(default)s)")
    options = parser.parse_args(argv)
    folder = pathlib.Path(options.folder)
    config = ModelConfig(num_hidden_layers=options.layers)
    # An existing folder is an error, because the folder is removed at the end with all that is in it.
    folder.mkdir(parents=True)
    try:
        rows = measure(config, folder)
        report(config, folder, rows)
    finally:
        shutil.rmtree(folder)


def measure(config: ModelConfig, folder: pathlib.Path) -> list[Measured]:
    """Writes weights, copies them, and converts them to a run and back."""
    native, copy, run, back = (folder / name for name in ("native", "copy", "run", "back"))
    source = RandomWeights(config)
    files = pytorch_files(
        source, "native", of_tokenizer(None, source.config, story=("Random weights.",)), dtype=None
    )
    write_folder(source, files, native, NoProgress())
    convert = [sys.executable, "-m", "zaya_jax.cli", "convert"]
    # A plain copy moves the same bytes, and shows what the disk allows.
    rows = [_timed("cp", native, copy, ["cp", "-r"])]
    # The disk need not hold it next to what follows.
    shutil.rmtree(copy)
    return [
        *rows,
        _timed("native to run", native, run, convert),
        _timed("run to native", run, back, convert),
    ]


def _timed(name: str, source: pathlib.Path, target: pathlib.Path, command: Sequence[str]) -> Measured:
    """Runs a command in its own process, until its files are on the disk."""
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    # The files were just written, and would be read from memory.
    _evict(source)
    start = time.monotonic()
    process = subprocess.Popen([*command, str(source), str(target)])
    # wait4 returns the resource usage of exactly this child.
    _, status, usage = os.wait4(process.pid, 0)
    # Popen has not waited itself: without a code it would take the child for running, and warn.
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise UserError(f"{' '.join(command)} ended with {process.returncode}")
    # `cp` does not sync what it writes: without this it would seem faster than the disk.
    sync_tree(target)
    seconds = time.monotonic() - start
    # Linux reports the peak in KiB.
    return Measured(name, size, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _evict(folder: pathlib.Path) -> None:
    """Drops a folder's files from the page cache, so that reading them reads the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            sync(file)  # dirty pages cannot be dropped
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(config: ModelConfig, folder: pathlib.Path, rows: list[Measured]) -> None:
    """Prints the times, and whether the weights came back unchanged."""
    columns = map(number_column, ("GB", "s", "GB/s", "processor, s", "peak memory, GB"))
    table = Table(name_column("step"), *columns, title=f"{config.num_hidden_layers} layers")
    for row in rows:
        figures = (
            f"{row.size / 1e9:.2f}",
            f"{row.seconds:.1f}",
            f"{row.size / 1e9 / row.seconds:.2f}",
            f"{row.busy:.1f}",
            f"{row.peak / 1e9:.2f}",
        )
        table.add_row(row.name, *figures)
    console = Console(soft_wrap=True, highlight=False)
    console.print(table)
    back = stored_tensors(folder / "back")
    values = sum(int(np.prod(tensor.shape)) for tensor in back.values())
    biases = config.num_hidden_layers * config.num_router_classes
    console.print(f"{len(back):,} tensors, {values - biases:,} parameters and {biases:,} balancing biases")
    # The exported tensors are complete.
    assert values - biases == count_parameters(config)
    # The checksums must be those of the disk, and not of the pages that the conversion has left in memory.
    _evict(folder / "back")
    damaged = check_checksums(folder / "back")
    same = _weight_checksums(folder / "native") == _weight_checksums(folder / "back")
    console.print(f"read again from the disk: {damaged or 'as written'}")
    console.print(f"SHA-256 of all shards, before and after: {'equal' if same else 'DIFFERENT'}")


def _weight_checksums(folder: pathlib.Path) -> list[str]:
    lines = (folder / CHECKSUMS).read_text().splitlines()
    return [line for line in lines if line.endswith(".safetensors")]


if __name__ == "__main__":
    main()
