"""Custom optimizers, batch functions and hooks in a run, as in the README."""

import dataclasses
import itertools
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
from small_runs import build_small_corpus, small_config

from zaya_jax.checkpoint import load_run
from zaya_jax.config import TasksConfig
from zaya_jax.train.compiled_programs import whole_variables
from zaya_jax.train.extensions import Extensions
from zaya_jax.train.hooks.evaluation import EvaluationTasks
from zaya_jax.train.hooks.hook import Hook
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def example() -> dict:
    """Returns the arguments of `train` in the README's example."""
    (code,) = re.findall(r"```python\n(import dataclasses\nimport optax\n.*?)```", README.read_text(), re.S)
    definitions, call = code.split("\ntrain(run, ")
    names: dict = {}
    exec(definitions, names)
    return eval(f"dict({call.strip()}", names)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("extensions")
    build_small_corpus(root / "corpus")
    whole = small_config(run_folder=root / "run", corpus=root / "corpus")
    return dataclasses.replace(
        whole,
        model=dataclasses.replace(whole.model, num_hidden_layers=1, layer_pattern=("hybrid",)),
        optimizer=dataclasses.replace(whole.optimizer, schedule="constant", warmup_steps=0),
        train=dataclasses.replace(
            whole.train, num_steps=4, checkpoint_every=2, eval_every=2, eval_sequences=4
        ),
    )


class Recorder(Hook):
    """Keeps the rows that are logged, the weights after each step, and the order of events."""

    def __init__(self):
        self.rows, self.states, self.events = [], [], []

    def on_step(self, context):
        self.states.append((context.step, jax.tree.map(np.array, context.state.buckets)))
        self.events.append(f"step {context.step}")

    def on_log(self, context, values):
        self.rows.append((context.step, "train", values))
        self.events.append("log")

    def on_evaluate(self, context, kind, values):
        self.rows.append((context.step, kind, values))
        self.events.append("evaluate")

    def on_save(self, context):
        self.events.append("save")

    def on_start(self, context):
        self.events.append("start")

    def on_end(self, context, error):
        self.events.append(f"end {error}")


@pytest.fixture(scope="module")
def trained(example, config) -> Recorder:
    """What the example's run recorded."""
    recorder = Recorder()
    train(config, extensions=example["extensions"], hooks=[*example["hooks"], recorder])
    return recorder


@pytest.mark.slow
def test_events_come_in_their_order(trained):
    evaluated = ["log", "evaluate", "save"]
    steps = ["step 1", "log", "step 2", *evaluated, "step 3", "log", "step 4", *evaluated]
    assert trained.events == ["start", *steps, "end None"]


@pytest.mark.slow
def test_the_example_of_the_readme_trains(trained, config):
    """With Lion every weight changes by exactly the learning rate, in addition to the decay."""
    logged, states = trained.rows, trained.states
    rows = {(row["step"], row["kind"]): row for row in read_metrics(config.run_folder, "train")}
    rows |= {(row["step"], row["kind"]): row for row in read_metrics(config.run_folder, "validation")}
    assert [(step, kind) for step, kind, _ in logged] == list(dict.fromkeys((s, k) for s, k, _ in logged))
    assert {(step, kind): values | {"step": step, "kind": kind} for step, kind, values in logged} == rows
    assert [step for step, _ in states] == [1, 2, 3, 4]
    rate, decay = config.optimizer.learning_rate, 0.1
    for (_, before), (_, after) in itertools.pairwise(states):
        for name, x in before.items():
            moved = (x * (1 - rate * decay) - after[name]) / rate
            # The rounding of float32 near 1; a step is 3e-3 of that.
            np.testing.assert_allclose(np.abs(moved[x != 0]), 1.0, atol=1e-3)
    masked = {values["targets"] for _, kind, values in logged if kind == "train" and "targets" in values}
    assert all(count < config.data.batch_tokens for count in masked)


@pytest.mark.usefixtures("trained")
def test_a_run_with_extensions_can_be_resumed(example, config, tmp_path):
    """The state of a custom optimizer is saved and restored like the built-in one's."""
    folder = tmp_path / "run"
    shutil.copytree(config.run_folder, folder)
    shutil.rmtree(folder / "checkpoints/4")
    train(dataclasses.replace(config, run_folder=str(folder)), extensions=example["extensions"])
    assert read_metrics(folder, "train") != []
    for ours, theirs in zip(
        read_metrics(folder, "train"), read_metrics(config.run_folder, "train"), strict=True
    ):
        assert ours["loss"] == theirs["loss"]
    both = (load_run(each).variables for each in (folder, config.run_folder))
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_a_batch_of_another_shape_is_refused(config, tmp_path):
    shorter = Extensions(batch=lambda batch: jax.tree.map(lambda x: x[:, :-1], batch))
    with pytest.raises(
        ValueError, match=r"returns tokens_BT as int32 \(4, 63\); it must stay int32 \(4, 64\)"
    ):
        train(dataclasses.replace(config, run_folder=str(tmp_path / "run")), extensions=shorter)


@pytest.mark.usefixtures("trained")
def test_tasks_score_the_current_weights(config, tmp_path, capsys):
    """Every few steps and at the end; a failure is reported, and training is unchanged."""
    shutil.copytree(config.run_folder, run_folder := tmp_path / "run")
    tasks = TasksConfig(names=("any",), every=3)
    config = dataclasses.replace(config, run_folder=str(run_folder), tasks=tasks)
    calls, recorder = [], Recorder()

    def score(step, model, variables):
        calls.append((step, model.config, jax.tree.map(np.array, variables["params"])))
        if step == 3:
            raise ValueError("unknown task")
        return {"arithmetic/acc": 0.25}

    result = train(config, overwrite=True, hooks=[EvaluationTasks(score), recorder])
    assert [(step, model) for step, model, _ in calls] == [(3, config.model), (4, config.model)]
    assert "step 3: the tasks failed, and training continues: unknown task" in (
        out := capsys.readouterr().out
    )
    assert "step 4: arithmetic/acc 0.2500" in out
    (row,) = read_metrics(config.run_folder, "tasks")
    assert row == {"step": 4, "kind": "tasks", "arithmetic/acc": 0.25}
    assert (4, "tasks", {"arithmetic/acc": 0.25}) in recorder.rows
    last = whole_variables(result.state, result.mesh)["params"]
    jax.tree.map(np.testing.assert_array_equal, calls[-1][-1], jax.tree.map(np.array, last))
    with pytest.raises(ValueError, match=r"tasks\.names has any, but no hook scores them"):
        train(config)
    # With a config without tasks, which does not require the hook.
    plain = train(dataclasses.replace(config, tasks=TasksConfig()), overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, plain.state.buckets, result.state.buckets)
