"""Runs on a disk that fails or is slow: one error message, no lost step, and the same command resumes.

`storage.c` is preloaded before the C library of a run's process, and makes calls within the run folder fail:
the first write, one in the middle or one of the last, and from then on all of them. The number of calls is
counted in an undisturbed run, with which a resumed run is also compared.
"""

import dataclasses
import errno
import os
import pathlib
import shutil
import subprocess
import sys

import pytest
from small_runs import build_small_corpus, small_values

import zaya_jax
from zaya_jax.checkpoint import damage_of, newest_step
from zaya_jax.checkpoint.format.layout import all_steps
from zaya_jax.config import CONFIG_FILE, Config
from zaya_jax.train.metrics.files import read_metrics

ROOT = pathlib.Path(zaya_jax.__file__).parents[1]
LIMIT_SECONDS = 240
"""Time limit of a process; a run takes 10 s on an idle machine."""
STEPS = [2, 4, 6]


@pytest.fixture(scope="module")
def disk(tmp_path_factory) -> pathlib.Path:
    """Compiles the library that injects faults."""
    compiler = shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        pytest.skip("a C compiler for Linux makes the failing disk, and there is none")
    library = tmp_path_factory.mktemp("disk") / "storage.so"
    source = pathlib.Path(__file__).with_name("storage.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> pathlib.Path:
    return build_small_corpus(tmp_path_factory.mktemp("data") / "corpus").folder


def small_run(folder: pathlib.Path, corpus: pathlib.Path, **train) -> Config:
    """Six steps of the smallest network, and a checkpoint every two steps."""
    values = small_values(run_folder=str(folder), corpus=str(corpus))
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["optimizer"] |= {"name": "adamw", "warmup_steps": 2}
    values["train"] |= {"num_steps": 6, "checkpoint_every": 2, "eval_every": 6, "eval_sequences": 4}
    values["train"] |= {"keep_checkpoints": 3} | train
    return Config.from_dict(values)


@dataclasses.dataclass(frozen=True)
class Fault:
    """Returns the environment for `storage.c`."""

    calls: str
    number: int = 0
    first: int = 1
    times: int = 10**9
    milliseconds: int = 0
    within: str = ""

    def settings(self, run_folder: str) -> dict[str, str]:
        return {
            "FAULT_FOLDER": str(pathlib.Path(run_folder) / self.within),
            "FAULT_CALLS": self.calls,
            "FAULT_ERRNO": str(self.number),
            "FAULT_FROM": str(self.first),
            "FAULT_TIMES": str(self.times),
            "FAULT_MILLISECONDS": str(self.milliseconds),
        }


def train(config: Config, settings: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Returns exit code, stdout and stderr of `zaya train` in a separate process."""
    file = pathlib.Path(config.run_folder).with_name("settings") / CONFIG_FILE
    file.parent.mkdir(exist_ok=True)
    file.write_text(config.to_text())
    done = subprocess.run(
        [sys.executable, "-m", "zaya_jax.cli", "train", f"--config={file}"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **(settings or {})},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


def losses(config: Config) -> dict[int, float]:
    rows = read_metrics(config.run_folder, "train")
    assert len({row["step"] for row in rows}) == len(rows)
    return {row["step"]: row["loss"] for row in rows}


def assert_whole(config: Config, steps: list[int]) -> None:
    assert all_steps(config.run_folder) == steps
    assert [damage_of(config.run_folder, step) for step in steps] == [None] * len(steps)


@pytest.mark.slow
def test_a_run_may_continue_after_a_failed_save(disk, corpus, tmp_path):
    """Writes of Orbax fail in the first save; the second is on time, and the last ends the run."""
    config = small_run(tmp_path / "run", corpus, on_failed_save="continue")
    fault = Fault("write", errno.ENOSPC, times=1, within="checkpoints")
    code, out, err = train(config, {"LD_PRELOAD": str(disk), **fault.settings(config.run_folder)})
    assert (code, err) == (0, "")
    says = (
        f"a checkpoint of {config.run_folder} could not be written: No space left on device; there is no "
        "earlier one; training continues, and the next save is tried"
    )
    assert [line for line in out.splitlines() if "could not" in line] == [says]
    assert_whole(config, STEPS[1:])
    assert list(losses(config)) == [1, 2, 3, 4, 5, 6]


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    losses: dict[int, float]
    counts: dict[str, int]
    """Counts calls in the run folder by kind."""


@pytest.fixture(scope="module")
def undisturbed(disk, corpus, tmp_path_factory) -> Undisturbed:
    folder = tmp_path_factory.mktemp("undisturbed")
    config, counts = small_run(folder / "run", corpus), folder / "counts"
    settings = {"FAULT_FOLDER": config.run_folder, "FAULT_COUNTS": str(counts), "LD_PRELOAD": str(disk)}
    code, _, err = train(config, settings)
    assert (code, err) == (0, "")
    assert_whole(config, STEPS)
    actual = dict(line.split() for line in counts.read_text().splitlines())
    return Undisturbed(losses(config), {kind: int(number) for kind, number in actual.items()})


CAUSES = {number: os.strerror(number) for number in (errno.ENOSPC, errno.EIO, errno.EROFS)}
DISKS = (("write", errno.ENOSPC), ("fsync", errno.EIO), ("rename", errno.EIO), ("change", errno.EROFS))
FAILING = [(calls, number, share) for calls, number in DISKS for share in (0.0, 0.2, 0.5, 0.8, 0.99)]


@pytest.mark.campaign  # each runs twice, in separate processes
@pytest.mark.parametrize(("calls", "number", "share"), FAILING)
def test_a_failing_disk_is_a_user_error_and_loses_no_step(
    disk, corpus, undisturbed, tmp_path, calls, number, share
):
    config = small_run(tmp_path / "run", corpus)
    fault = Fault(calls, number, first=1 + int(share * undisturbed.counts[calls]))
    code, _, err = train(config, {"LD_PRELOAD": str(disk), **fault.settings(config.run_folder)})
    assert code == 2, err
    assert err.startswith("zaya: train: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    assert str(tmp_path / "run") in err
    assert CAUSES[number] in err
    assert_whole(config, [step for step in STEPS if step in all_steps(config.run_folder)])

    code, _, err = train(config)
    assert (code, err) == (0, "")
    assert losses(config) == undisturbed.losses
    assert newest_step(config.run_folder) == STEPS[-1]
    assert not [path for path in tmp_path.rglob("*") if ".partial" in path.name]


@pytest.mark.campaign
@pytest.mark.parametrize(("calls", "milliseconds"), [("write", 20), ("fsync", 300)])
def test_a_slow_disk_only_delays_a_run(disk, corpus, undisturbed, tmp_path, calls, milliseconds):
    config = small_run(tmp_path / "run", corpus)
    fault = Fault(calls, milliseconds=milliseconds)
    code, _, err = train(config, {"LD_PRELOAD": str(disk), **fault.settings(config.run_folder)})
    assert (code, err) == (0, "")
    assert losses(config) == undisturbed.losses
    assert_whole(config, STEPS)


@pytest.mark.campaign
def test_the_last_checkpoint_must_be_written(disk, corpus, undisturbed, tmp_path):
    """A run that tolerates failed saves ends with an error if the last one fails."""
    config = small_run(tmp_path / "run", corpus, on_failed_save="continue")
    fault = Fault("fsync", errno.EIO, within="checkpoints")
    code, out, err = train(config, {"LD_PRELOAD": str(disk), **fault.settings(config.run_folder)})
    assert code == 2
    assert out.count("there is no earlier one; training continues, and the next save is tried\n") == 2
    assert err.startswith(f"zaya: train: a checkpoint of {config.run_folder} could not be written: ")
    assert err.endswith(
        "; there is no earlier one; fix the cause, then run the same command again to resume\n"
    )
    assert err.count("\n") == 1
    assert all_steps(config.run_folder) == []
    assert train(config)[0] == 0
    assert losses(config) == undisturbed.losses
