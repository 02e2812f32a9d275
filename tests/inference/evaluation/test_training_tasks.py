"""Tasks during training: the metrics of `zaya eval` on the same weights, with any number of processes."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from small_runs import build_small_corpus, small_values

from zaya_jax import cli
from zaya_jax.config import Config
from zaya_jax.inference.evaluation.lm_eval_tasks import figures_of
from zaya_jax.train.metrics.files import read_metrics

ROOT = pathlib.Path(__file__).parents[3]
TASKS = pathlib.Path(__file__).parent / "tasks"
NAMES = ("zaya_choice", "zaya_texts", "zaya_stopped")
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is an extra: pip install -e '.[eval]'"
)
pytestmark = pytest.mark.filterwarnings("default")
"""Warnings of lm-eval and of what it imports are for others to mend."""


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks") / "corpus"
    build_small_corpus(folder)
    return folder


def config_file(folder, corpus, **tasks):
    """A run of four steps with tasks after steps two and four."""
    values = small_values(run_folder=str(folder / "run"), corpus=str(corpus))
    values["optimizer"] |= {"warmup_steps": 1}
    values["train"] |= {"num_steps": 4, "checkpoint_every": 2}
    asked = {"names": NAMES, "every": 2, "folder": ".", "limit": 2, "context": 96}
    path = folder / "config.json"
    path.write_text(Config.from_dict(values | {"tasks": asked | tasks}).to_text())
    return path


@needs_harness
def test_metrics_equal_those_of_eval(corpus, tmp_path, capsys):
    with contextlib.chdir(TASKS):  # the paths in the task files start here
        cli.main(["train", f"--config={config_file(tmp_path, corpus)}"])
        words = f"--tasks={','.join(NAMES)}", "--limit=2", "--context=96", f"--json={tmp_path}/out.json"
        cli.main(["eval", str(tmp_path / "run"), "--task-folder=.", *words])
    rows = read_metrics(tmp_path / "run", "tasks")
    assert [row["step"] for row in rows] == [2, 4]
    expected = figures_of(json.loads((tmp_path / "out.json").read_text())["tasks"])
    assert {"zaya_choice/acc", "zaya_texts/bits_per_byte"} < expected.keys()
    assert rows[1] == {"step": 4, "kind": "tasks"} | expected
    assert rows[0]["zaya_texts/bits_per_byte"] > rows[1]["zaya_texts/bits_per_byte"]
    assert f"step 4: zaya_choice/acc {expected['zaya_choice/acc']:.4f}" in capsys.readouterr().out


@needs_harness
def test_processes_share_the_tasks(corpus, tmp_path):
    """Two processes of two devices each have bitwise the results of `zaya eval` on one device."""
    config = config_file(tmp_path, corpus)
    launch = [sys.executable, "-m", "zaya_jax.cli", "launch", "--processes=2", "--devices=2", "--"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    ended = subprocess.run(
        [*launch, "train", f"--config={config}"],
        cwd=TASKS, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    rows = read_metrics(tmp_path / "run", "tasks")
    assert [row["step"] for row in rows] == [2, 4]
    with contextlib.chdir(TASKS):
        words = f"--tasks={','.join(NAMES)}", "--limit=2", "--context=96", f"--json={tmp_path}/out.json"
        cli.main(["eval", str(tmp_path / "run"), "--task-folder=.", *words])
    expected = figures_of(json.loads((tmp_path / "out.json").read_text())["tasks"])
    assert rows[1] == {"step": 4, "kind": "tasks"} | expected


@needs_harness
def test_an_unknown_task_fails_before_training(corpus, tmp_path, capsys):
    config = config_file(tmp_path, corpus, names=("zaya_choise",))
    with contextlib.chdir(TASKS), pytest.raises(SystemExit, match="2"):
        cli.main(["train", f"--config={config}"])
    assert 'unknown task "zaya_choise"' in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@needs_harness
def test_a_failing_round_is_reported_and_training_continues(corpus, tmp_path, capsys):
    config = config_file(tmp_path, corpus, names=("zaya_odd",))
    with contextlib.chdir(TASKS):
        cli.main(["train", f"--config={config}"])
    assert "and the run goes on: a task generates with num_beams" in capsys.readouterr().out
    assert read_metrics(tmp_path / "run", "tasks") == []


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is not None, reason="lm-eval is installed")
def test_missing_lm_eval_names_the_install_command(corpus, tmp_path, capsys):
    with contextlib.chdir(TASKS), pytest.raises(SystemExit, match="2"):
        cli.main(["train", f"--config={config_file(tmp_path, corpus)}"])
    sentence = r"tasks.names needs lm-eval, which is not installed: .*pip install 'lm-eval>="
    assert re.search(sentence, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


REPLICAS = """
import jax
from zaya_jax.inference.evaluation import training_tasks
from zaya_jax.parallel.mesh import data_mesh, replicated

training_tasks.make_replicas = lambda model, variables: (variables,)
variables = {name: jax.device_put(jax.numpy.ones(3), replicated(data_mesh())) for name in "ab"}
for replica in training_tasks.local_replicas(None, variables):
    print(*(device.id for leaf in replica.values() for device in leaf.devices()))
"""


def test_each_device_gets_its_own_copy_of_the_weights():
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", REPLICAS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert done.stdout.split("\n") == ["0 0", "1 1", "2 2", "3 3", ""]
