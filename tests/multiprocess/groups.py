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
"""Metrics that do not depend on what was learned."""


def write_config(
    run_folder: pathlib.Path, corpus: pathlib.Path, *, batch_size: int = 8, **train: int
) -> pathlib.Path:
    """Writes the config file of a run of the smallest network next to its folder."""
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
    """Starts or resumes a run under `zaya launch`, with a number of devices per process."""
    launch = [
        f"--processes={processes}",
        f"--devices={devices}",
        "--grace-seconds=20",
        f"--max-restarts={restarts}",
    ]
    command = [sys.executable, "-m", "zaya_jax.cli", "launch", *launch, "--", "train", f"--config={config}"]
    return start_words([*command, *words])


def start_words(words: list[str]) -> subprocess.Popen:
    """Starts a program with this checkout on its path, and jax on CPUs."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests/multiprocess")))
    return subprocess.Popen(
        words,
        env=os.environ | {"PYTHONPATH": paths, "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> tuple[int, str]:
    """Returns exit code and output of a program that must end within the limit."""
    try:
        output, _ = process.communicate(timeout=LIMIT_SECONDS)
    finally:
        process.kill()
    return process.returncode, output


def rows(run_folder: pathlib.Path) -> list[dict]:
    """Returns all rows of metrics.jsonl without timings."""
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def last_step(run_folder: pathlib.Path) -> int:
    """Returns the last step with a complete row in metrics.jsonl; 0 without any."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def children(process: subprocess.Popen) -> list[int]:
    """Returns the processes that a launch has started, ordered by number."""
    path = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in path.read_text().split()]
