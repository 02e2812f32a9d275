"""Processes of one run that differ: each reports it in `zaya train`, before anything is compiled."""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import pytest
from groups import LIMIT_SECONDS, ROOT, write_config

PACKAGES = ("zaya_jax", "pallas_kernels", "configs")


@dataclasses.dataclass(frozen=True)
class Difference:
    """Differences of one process: options, and a folder that precedes this checkout on its path."""

    options: tuple[str, ...] = ()
    path: pathlib.Path | None = None


def another_field(tmp_path: pathlib.Path, corpus: pathlib.Path) -> Difference:
    return Difference(options=("--config.optimizer.learning_rate=0.002",))


def another_code_file(tmp_path: pathlib.Path, corpus: pathlib.Path) -> Difference:
    for name in PACKAGES:
        shutil.copytree(ROOT / name, tmp_path / "code" / name)
    file = tmp_path / "code/zaya_jax/model/rope.py"
    file.write_bytes(file.read_bytes() + b"#\n")
    return Difference(path=tmp_path / "code")


def another_package(tmp_path: pathlib.Path, corpus: pathlib.Path) -> Difference:
    metadata = tmp_path / "packages/optax-9.9.9.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: optax\nVersion: 9.9.9\n")
    return Difference(path=tmp_path / "packages")


def another_byte_of_the_corpus(tmp_path: pathlib.Path, corpus: pathlib.Path) -> Difference:
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    shard = max(copy.rglob("*.array_record"), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    return Difference(options=(f"--config.data.corpus={copy}",))


CASES = [
    (another_field, "has optimizer.learning_rate 0.002 instead of 0.003", 2),
    (another_code_file, "zaya_jax/model/rope.py", 2),
    (another_package, "has optax 9.9.9 instead of", 2),
    (another_byte_of_the_corpus, "copy", 65),
]


@pytest.mark.parametrize(
    ("make", "sentence", "code", "processes"),
    [
        pytest.param(
            *case,
            processes,
            marks=() if (case[0], processes) == (another_field, 2) else pytest.mark.campaign,
            id=f"{case[0].__name__}-{processes}",
        )
        for case in CASES
        for processes in (2, 4)
    ],
)
def test_each_process_names_the_difference(make, sentence, code, processes, corpus, tmp_path):
    difference = make(tmp_path, corpus)
    config = write_config(tmp_path / "run", corpus)
    outputs = run_processes(config, processes, {processes - 1: difference})
    for ended, output in outputs:
        assert ended == code, output
        assert f"process {processes - 1}" in output
        assert sentence in output
        assert "Traceback" not in output
        assert "compiling" not in output


def run_processes(
    config: pathlib.Path, processes: int, differences: dict[int, Difference]
) -> list[tuple[int, str]]:
    """Returns exit code and output of each process of one run."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with contextlib.ExitStack() as stack:
        started = [
            stack.enter_context(
                start_one(config, address, processes, number, differences.get(number, Difference()))
            )
            for number in range(processes)
        ]
        stack.callback(lambda: [process.kill() for process in started])
        outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in started]
    return [(process.returncode, output) for process, output in zip(started, outputs, strict=True)]


def start_one(
    config: pathlib.Path, address: str, processes: int, number: int, difference: Difference
) -> subprocess.Popen:
    paths = [path for path in (difference.path, ROOT) if path is not None]
    group = {
        "JAX_COORDINATOR_ADDRESS": address,
        "JAX_NUM_PROCESSES": str(processes),
        "JAX_PROCESS_ID": str(number),
    }
    return subprocess.Popen(
        [sys.executable, "-m", "zaya_jax.cli", "train", f"--config={config}", *difference.options],
        env=os.environ | group | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu"},
        cwd=config.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
