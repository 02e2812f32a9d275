"""One's own optimiser, loss mask, logger and callback in the loop of `zaya train`, as the README has them."""

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
from zaya_jax.train.extensions import Extensions
from zaya_jax.train.loop import train
from zaya_jax.train.metrics import read_metrics
from zaya_jax.train.programs import whole_variables

README = pathlib.Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def example() -> dict:
    """What README's lines define; the run itself is left out."""
    (code,) = re.findall(r"```python\n(import dataclasses\nimport optax\n.*?)```", README.read_text(), re.S)
    definitions, call = code.split("\ntrain(run, extensions=")
    found: dict = {}
    exec(definitions, found)
    return found | {"extensions": eval(call.strip().removesuffix(")"), found)}


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


@pytest.fixture(scope="module")
def trained(example, config) -> tuple[list, list]:
    """The example's run: what its logger was told, and the weights after each step."""
    told, states = [], []
    given = dataclasses.replace(
        example["extensions"],
        logger=lambda *values: told.append(values),
        after_step=lambda step, state: states.append((step, jax.tree.map(np.array, state.buckets))),
    )
    train(config, extensions=given)
    return told, states


@pytest.mark.slow
def test_the_example_of_the_readme_trains(trained, config):
    """By Lion every weight moves by the rate alone, up or down, beside the decay."""
    told, states = trained
    rows = {(row["step"], row["kind"]): row for row in read_metrics(config.run_folder, "train")}
    rows |= {(row["step"], row["kind"]): row for row in read_metrics(config.run_folder, "validation")}
    assert [(step, kind) for step, kind, _ in told] == list(dict.fromkeys((s, k) for s, k, _ in told))
    assert {(step, kind): values | {"step": step, "kind": kind} for step, kind, values in told} == rows
    assert [step for step, _ in states] == [1, 2, 3, 4]
    rate, decay = config.optimizer.learning_rate, 0.1
    for (_, before), (_, after) in itertools.pairwise(states):
        for name, x in before.items():
            moved = (x * (1 - rate * decay) - after[name]) / rate
            # Its float32 is that of a weight of 1 or so, and a step is 3e-3 of that.
            np.testing.assert_allclose(np.abs(moved[x != 0]), 1.0, atol=1e-3)
    masked = {values["targets"] for _, kind, values in told if kind == "train" and "targets" in values}
    assert all(count < config.data.batch_tokens for count in masked)


@pytest.mark.usefixtures("trained")
def test_a_run_with_extensions_goes_on(example, config, tmp_path):
    """What the optimiser keeps is saved and restored like that of the house."""
    folder = tmp_path / "run"
    shutil.copytree(config.run_folder, folder)
    shutil.rmtree(folder / "checkpoints/4")
    given = dataclasses.replace(example["extensions"], logger=None, after_step=None)
    train(dataclasses.replace(config, run_folder=str(folder)), extensions=given)
    assert read_metrics(folder, "train") != []
    for ours, theirs in zip(
        read_metrics(folder, "train"), read_metrics(config.run_folder, "train"), strict=True
    ):
        assert ours["loss"] == theirs["loss"]
    both = (load_run(each).variables for each in (folder, config.run_folder))
    jax.tree.map(np.testing.assert_array_equal, *both)


def test_a_batch_of_another_shape_is_refused(config, tmp_path):
    shorter = Extensions(batch=lambda batch: jax.tree.map(lambda x: x[:, :-1], batch))
    with pytest.raises(ValueError, match=r"gives tokens_BT as int32 \(4, 63\); it must stay int32 \(4, 64\)"):
        train(dataclasses.replace(config, run_folder=str(tmp_path / "run")), extensions=shorter)


@pytest.mark.usefixtures("trained")
def test_tasks_are_asked_of_the_weights_as_they_are(config, tmp_path, capsys):
    """Every so many steps and at the end; one that fails is told, and no step is another for it."""
    shutil.copytree(config.run_folder, run_folder := tmp_path / "run")
    tasks = TasksConfig(names=("any",), every=3)
    config = dataclasses.replace(config, run_folder=str(run_folder), tasks=tasks)
    asked, told = [], []

    def ask(step, model, variables):
        asked.append((step, model.config, jax.tree.map(np.array, variables["params"])))
        if step == 3:
            raise ValueError("nobody knows the task")
        return {"arithmetic/acc": 0.25}

    given = Extensions(tasks=ask, logger=lambda *values: told.append(values))
    result = train(config, overwrite=True, extensions=given)
    assert [(step, model) for step, model, _ in asked] == [(3, config.model), (4, config.model)]
    assert "step 3: tasks without an answer, and the run goes on: nobody knows the task" in (
        out := capsys.readouterr().out
    )
    assert "step 4: arithmetic/acc 0.2500" in out
    (row,) = read_metrics(config.run_folder, "tasks")
    assert row == {"step": 4, "kind": "tasks", "arithmetic/acc": 0.25}
    assert (4, "tasks", {"arithmetic/acc": 0.25}) in told
    last = whole_variables(result.state, result.mesh)["params"]
    jax.tree.map(np.testing.assert_array_equal, asked[-1][-1], jax.tree.map(np.array, last))
    with pytest.raises(ValueError, match=r"tasks\.names has any, and extensions\.tasks nobody who asks them"):
        train(config)
    # Of the same config without tasks, or it would be none of the same run.
    plain = train(dataclasses.replace(config, tasks=TasksConfig()), overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, plain.state.buckets, result.state.buckets)
