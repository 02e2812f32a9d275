"""Converting ZAYA1-8B on a small machine: made-up weights of its full size, to a run and back.

`python -m zaya_jax.bench.conversion FOLDER` needs 54 GB of disk there. `--layers 12` does with 17.

README.md, "Weights from and to PyTorch", has what was measured.
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
from zaya_jax.convert.companions import of_tokenizer
from zaya_jax.convert.layouts import ROUTER_BIAS, WeightSlice
from zaya_jax.convert.plans import pytorch_files
from zaya_jax.convert.pytorch_folder import stored_tensors
from zaya_jax.convert.stream import Unwatched, check_checksums, write_folder
from zaya_jax.durable import CHECKSUMS, sync, sync_tree
from zaya_jax.model.weights import count_parameters
from zaya_jax.options import Parser
from zaya_jax.tables import name_column, number_column


@dataclasses.dataclass(frozen=True)
class MadeUpWeights:
    """Random finite bfloat16 values, the same for everybody who asks for a slice."""

    config: ModelConfig

    def dtype(self, path: str) -> np.dtype:
        """Float32 for the balancing biases, bfloat16 for all else: as released."""
        return np.dtype(np.float32 if path == ROUTER_BIAS else ml_dtypes.bfloat16)

    def read(self, weight_slice: WeightSlice) -> np.ndarray:
        """A slice whose values follow from its place alone."""
        rng = np.random.default_rng([zlib.crc32(weight_slice.path.encode()), *weight_slice.start])
        if weight_slice.path == ROUTER_BIAS:
            return rng.uniform(-0.1, 0.1, weight_slice.shape).astype(np.float32)
        # Without the highest bit of the exponent all values are finite, and below 2.
        bits = np.frombuffer(rng.bytes(2 * weight_slice.size), np.uint16) & 0xBFFF
        return bits.view(ml_dtypes.bfloat16).reshape(weight_slice.shape)

    def identity(self) -> list[Any]:
        """The network: the values follow from it."""
        return [dataclasses.asdict(self.config)]


@dataclasses.dataclass(frozen=True)
class Measured:
    """A step of the benchmark.

    Attributes:
      name: of the step.
      size: bytes that it moved.
      seconds: until they were on the disk.
      busy: seconds of processor time, of all cores.
      peak: bytes of memory that its process had at most, shared libraries included.
    """

    name: str
    size: int
    seconds: float
    busy: float
    peak: int


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m zaya_jax.bench.conversion`: measures, reports, and leaves nothing."""
    parser = Parser(
        "bench convert",
        "Converts made-up weights of ZAYA1-8B's size to a run and back.",
        ("python -m zaya_jax.bench.conversion /big/disk/new_folder",),
    )
    parser.add_argument("folder", help="is made, and removed at the end")
    parser.add_argument("--layers", type=int, default=40, help="of the network (default: %(default)s)")
    options = parser.parse_args(argv)
    folder = pathlib.Path(options.folder)
    config = ModelConfig(num_hidden_layers=options.layers)
    folder.mkdir(parents=True)
    try:
        rows = measure(config, folder)
        report(config, folder, rows)
    finally:
        shutil.rmtree(folder)


def measure(config: ModelConfig, folder: pathlib.Path) -> list[Measured]:
    """Writes weights, copies them, and converts them to a run and back."""
    native, copy, run, back = (folder / name for name in ("native", "copy", "run", "back"))
    source = MadeUpWeights(config)
    files = pytorch_files(
        source, "native", of_tokenizer(None, source.config, story=("Made up.",)), dtype=None
    )
    write_folder(source, files, native, Unwatched())
    convert = [sys.executable, "-m", "zaya_jax.cli", "convert"]
    rows = [_timed("cp", native, copy, ["cp", "-r"])]
    shutil.rmtree(copy)
    return [
        *rows,
        _timed("native to run", native, run, convert),
        _timed("run to native", run, back, convert),
    ]


def _timed(name: str, source: pathlib.Path, target: pathlib.Path, command: Sequence[str]) -> Measured:
    """Runs a command in a process of its own, until its files are on the disk."""
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    _evict(source)
    start = time.monotonic()
    process = subprocess.Popen([*command, str(source), str(target)])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise ValueError(f"{' '.join(command)} ended with {process.returncode}")
    sync_tree(target)
    seconds = time.monotonic() - start
    return Measured(name, size, seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def _evict(folder: pathlib.Path) -> None:
    """Takes a folder's files out of the page cache, so that reading them reads the disk."""
    for file in folder.rglob("*"):
        if file.is_file():
            sync(file)  # what waits to be written cannot leave
            with file.open("rb") as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def report(config: ModelConfig, folder: pathlib.Path, rows: list[Measured]) -> None:
    """Prints what was measured, and that what came back is what went out."""
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
    assert values - biases == count_parameters(config)
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
