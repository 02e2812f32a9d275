"""Runs of several processes on this machine, for tests: configs of the smallest network, and commands."""

import json
import os
import pathlib
import subprocess
import sys

from small_runs import small_values

from zaya_jax.config import Config

ROOT = pathlib.Path(__file__).parents[2]
LIMIT_SECONDS = 400
TIMES = ("tokens_per_second", "model_flops_utilisation")
"""Metrics that say nothing of what was learned."""


def write_config(
    run_folder: pathlib.Path, corpus: pathlib.Path, *, batch_size: int = 8, **train: int
) -> pathlib.Path:
    """A config file of a run of the smallest network, beside its folder."""
    values = small_values(run_folder=str(run_folder), corpus=str(corpus))
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["data"]["batch_size"] = batch_size
    values["train"] |= {
        "num_steps": 12,
        "checkpoint_every": 4,
        "eval_every": 6,
        "keep_checkpoints": 3,
    } | train
    file = run_folder.with_suffix(".py")
    file.write_text(
        "import json\n\nimport ml_collections\n\n\ndef get_config():\n"
        f"    return ml_collections.ConfigDict(json.loads({Config.from_dict(values).to_text()!r}))\n"
    )
    return file


def start(
    config: pathlib.Path, *, processes: int, devices: int, words: tuple[str, ...] = (), restarts: int = 0
) -> subprocess.Popen:
    """Begins or goes on with a run, under `zaya launch`, each process with so many devices."""
    launch = [f"--processes={processes}", f"--devices={devices}", "--grace=20", f"--restarts={restarts}"]
    command = [sys.executable, "-m", "zaya_jax.cli", "launch", *launch, "--", "train", f"--config={config}"]
    return start_words([*command, *words])


def start_words(words: list[str]) -> subprocess.Popen:
    """Begins a program that finds the packages of this checkout, and jax on CPUs."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/multiprocess")))
    return subprocess.Popen(
        words,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Exit code and output of a program that must end within the limit."""
    try:
        said, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    return process.returncode, said


def rows(run_folder: pathlib.Path) -> list[dict]:
    """All lines of metrics.jsonl, without what the clock says."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def last_step(run_folder: pathlib.Path) -> int:
    """Of which metrics.jsonl has a whole line; 0 before there is one."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def children(process: subprocess.Popen) -> list[int]:
    """The processes that a launch has started, in the order of their numbers."""
    path = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]
