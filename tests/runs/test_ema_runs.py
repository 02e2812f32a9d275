"""Runs with a moving average of the weights, and averages of checkpoints, against float64 arithmetic."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_runs import build_small_corpus, small_config

from zaya_jax import cli
from zaya_jax.checkpoint import StoredWeights, has_average, load_run, read_description
from zaya_jax.config import Config, EmaConfig
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.errors import UserError
from zaya_jax.model.zaya import Zaya
from zaya_jax.plan.memory import memory_by_kind
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.step.state import init_state, make_setup
from zaya_jax.train.trainer import train

# Whole runs: the newest jax has its own list of them.
pytestmark = pytest.mark.slow

STEPS, HALF, DECAY = 6, 3, 0.6


def with_values(config: Config, values: dict) -> Config:
    sections = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in values.items()}
    return dataclasses.replace(config, **sections)


@dataclasses.dataclass(frozen=True)
class Trained:
    folder: pathlib.Path
    config: Config
    state: object

    def named(self, name: str, num_steps: int = STEPS, **values) -> Config:
        config = dataclasses.replace(self.config, run_folder=str(self.folder / name))
        return with_values(config, values | {"train": {"num_steps": num_steps}})

    def copy_until(self, name: str, step: int) -> None:
        """Copies the run as it was after a step."""
        shutil.copytree(self.folder / "run", self.folder / name)
        for each in range(step + 1, STEPS + 1):
            shutil.rmtree(self.folder / name / f"checkpoints/{each}")
        (self.folder / name / "config.json").write_text(self.named(name, step).to_text())


@pytest.fixture(name="trained", scope="module")
def fixture_trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ema")
    build_small_corpus(folder / "corpus")
    config = with_values(small_config(run_folder=folder / "run", corpus=folder / "corpus"), {
        "model": {"num_hidden_layers": 1, "layer_pattern": ("hybrid",)},
        "optimizer": {"name": "adamw", "warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-2},
        "train": {"num_steps": STEPS, "checkpoint_every": 1, "keep_checkpoints": STEPS, "eval_every": HALF,
                  "eval_sequences": 4, "update_norms": False},
        "ema": {"decay": DECAY},
    })  # fmt: skip
    return Trained(folder, config, train(config).state)


def read(folder, weights="raw", step=STEPS):
    stored = StoredWeights(folder, weights, step=step)
    return {name: stored.read(name, ()).astype(np.float64) for name in stored.shapes}


def initial(config):
    """Returns the initial weights as they are named in a checkpoint, in float64."""
    stored = jax.jit(lambda: init_state(config, make_setup(config)).stored)()
    leaves = jax.tree.leaves_with_path(stored)
    return {jax.tree_util.keystr(path, simple=True, separator="."): np.float64(x) for path, x in leaves}


def check_equal(ours, theirs):
    """Each step rounds three times, each to half of 2**-23; the values are at most those of the weights."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        bound = STEPS * 3 * 2.0**-24 * max(np.abs(theirs[name]).max(), 1e-3)
        np.testing.assert_allclose(value, theirs[name], rtol=0, atol=bound, err_msg=name)


def test_each_average_is_that_of_float64(trained):
    mean = initial(trained.config)
    for step in range(1, STEPS + 1):
        decay = min(DECAY, (1 + step) / (10 + step))
        weights = read(trained.folder / "run", step=step)
        mean = {name: decay * mean[name] + (1 - decay) * new for name, new in weights.items()}
        average = read(trained.folder / "run", "ema", step)
        check_equal(average, mean)
    # 0.39 at the sixth step: the warm-up matters, and the average is far from the weights.
    assert max(np.abs(average[name] - weights[name]).max() for name in mean) > 1e-3
    assert int(trained.state.ema.num_updates) == STEPS


def test_a_resumed_run_has_the_same_average_bitwise(trained):
    trained.copy_until("resumed", HALF)
    resumed = train(trained.named("resumed"))
    jax.tree.map(np.testing.assert_array_equal, resumed.state.ema, trained.state.ema)
    rows = [read_metrics(trained.folder / name, "validation") for name in ("resumed", "run")]
    assert rows[0] == rows[1]


@pytest.mark.campaign
def test_the_average_may_be_disabled_and_enabled_at_a_resume(trained, capsys):
    """It changes no weight, ends with the checkpoints after it, and starts from the weights."""
    trained.copy_until("changed", HALF)
    train(trained.named("changed", HALF + 1, ema={"decay": 0.0}))
    assert not has_average(trained.folder / "changed", HALF + 1)
    capsys.readouterr()
    state = train(trained.named("changed")).state
    out = capsys.readouterr().out
    assert f"the average of the weights starts from those of step {HALF + 1}" in out
    assert int(state.ema.num_updates) == STEPS - HALF - 1
    weights = [read(trained.folder / "changed", step=step) for step in range(HALF + 1, STEPS + 1)]
    mean = weights[0]
    for update, new in enumerate(weights[1:], 1):
        decay = (1 + update) / (10 + update)
        mean = {name: decay * mean[name] + (1 - decay) * new[name] for name in new}
    check_equal(read(trained.folder / "changed", "ema"), mean)
    for name, value in read(trained.folder / "run").items():
        np.testing.assert_array_equal(weights[-1][name], value)


def test_evaluations_report_the_loss_of_the_average(trained):
    row = read_metrics(trained.folder / "run", "validation")[-1]
    loaded = load_run(trained.folder / "run", "ema")
    corpus = open_corpus(trained.config.data.corpus)
    (rows,) = evaluation_batches(corpus, split="validation", sequence_length=64, batch_size=4, limit=4)
    batch = jax.tree.map(jnp.asarray, rows)
    model = Zaya(loaded.config.model, loaded.config.execution)
    logits_BTV = jax.jit(lambda: model.apply(
        loaded.variables, batch.tokens_BT, positions_BT=batch.positions_BT, segments_BT=batch.segments_BT
    ).logits_BTV)()  # fmt: skip
    losses_BT = optax.softmax_cross_entropy_with_integer_labels(logits_BTV, batch.targets_BT)
    loss = float((losses_BT * batch.weights_BT).sum() / batch.weights_BT.sum())
    assert row["ema/loss"] == pytest.approx(loss, rel=1e-5)
    assert row["ema/bits_per_byte"] / row["ema/loss"] == pytest.approx(row["bits_per_byte"] / row["loss"])
    assert abs(row["ema/loss"] - row["loss"]) > 1e-3


def test_the_average_is_converted_generated_from_and_copied(trained, capsys):
    run, out = str(trained.folder / "run"), trained.folder
    cli.main(["convert", run, str(out / "pytorch_ema"), "--weights=ema"])
    cli.main(["ckpt", "reshape", run, str(out / "copy"), "--weights-only", "--weights=ema"])
    cli.main(["convert", str(out / "copy"), str(out / "pytorch_copy")])
    tensors = [(out / name / "model.safetensors").read_bytes() for name in ("pytorch_ema", "pytorch_copy")]
    assert tensors[0] == tensors[1]
    for name, value in read(out / "copy").items():
        np.testing.assert_array_equal(value, read(run, "ema")[name])
    capsys.readouterr()
    texts = []
    for arguments in (["--weights=ema"], []):
        folder = run if arguments else str(out / "copy")
        cli.main(["generate", folder, "--prompt=def", "--temperature=0", "--max-new-tokens=4", *arguments])
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    text = out / "text.py"
    text.write_text("def f1(left):\n    total = left + 1\n")
    cli.main(["eval", run, "--weights=ema", f"--text={text}", f"--json={out / 'texts.json'}"])
    assert json.loads((out / "texts.json").read_text())["weights"] == "ema"


def test_the_mean_of_checkpoints_is_that_of_float64(trained, capsys):
    run, out = str(trained.folder / "run"), trained.folder
    cli.main(["ckpt", "average", run, str(out / "last"), "--last=3"])
    cli.main(["ckpt", "average", run, str(out / "narrow"), "--steps=6,2", "--dtype=bfloat16"])
    assert "narrow: mean of the weights of steps 2, 6 of" in capsys.readouterr().out
    weights = {step: read(run, step=step) for step in (2, 4, 5, 6)}
    last, narrow = read(out / "last"), read(out / "narrow")
    for name, value in weights[6].items():
        mean = (value + weights[4][name] + weights[5][name]) / 3
        np.testing.assert_array_equal(last[name], mean.astype(np.float32))
        pair = (value + weights[2][name]) / 2
        is_bias = name.startswith("router_bias")
        dtype = np.float32 if is_bias else jnp.bfloat16
        np.testing.assert_array_equal(narrow[name], pair.astype(dtype).astype(np.float64))
    description = read_description(out / "last", STEPS)
    assert description is not None
    assert description.weights == "mean of steps 4, 5, 6"
    cli.main(["ckpt", "ls", str(out / "last")])
    assert "5, 6" in capsys.readouterr().out
    assert load_run(out / "last").step == STEPS


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["ckpt", "average", "{run}", "{out}", "--last=1"], "--last is 1; it must be at least 2"),
        (["ckpt", "average", "{run}", "{out}", "--last=9"], "--last is 9, and .* has 6 checkpoints: 1, 2, 3"),
        (["ckpt", "average", "{run}", "{out}", "--steps=3,3"], "needs at least 2 different steps, and 1 is"),
        (["ckpt", "average", "{run}", "{out}", "--steps=3,x"], '--steps is "3,x"; it must be steps separ'),
        (["ckpt", "average", "{run}", "{out}", "--steps=3,7"], "no checkpoint of step 7; it has 1, 2"),
        (["ckpt", "reshape", "{run}", "{out}", "--weights=ema"], "resumes from its own weights, not from"),
        (["generate", "{out}", "--weights=ema"], "step 6 of .* has no average of the weights; remove --wei"),
    ],
)
def test_mistakes_are_named(trained, words, message, tmp_path, capsys):
    out = tmp_path / "out"
    if words[0] == "generate":
        cli.main(["ckpt", "reshape", str(trained.folder / "run"), str(out), "--weights-only"])
    with pytest.raises(SystemExit, match="2"):
        cli.main([word.format(run=trained.folder / "run", out=out) for word in words])
    assert re.search(message, capsys.readouterr().err)


def test_a_damaged_average_is_no_damage_of_the_weights(trained, tmp_path):
    shutil.copytree(trained.folder / "run", tmp_path / "run")
    shutil.rmtree(tmp_path / f"run/checkpoints/{STEPS}/ema/d")
    assert load_run(tmp_path / "run").step == STEPS
    assert load_run(tmp_path / "run", "ema").step == STEPS - 1


def test_the_plan_counts_the_average_and_a_run_without_one_has_no_arrays_of_it(trained):
    config = trained.config
    without = dataclasses.replace(config, ema=EmaConfig())
    name = "average of the weights, shard of this device"
    sizes = [sum(memory_by_kind(each, 2).values()) for each in (config, without)]
    added = memory_by_kind(config, 2)[name]
    assert sizes[0] - sizes[1] == added
    values = sum(weight.size for _, weight in trained.state.partition.weights)
    assert 4 * values / 2 <= added < 4 * values / 2 * 1.1
    assert jax.eval_shape(lambda: init_state(without, make_setup(without))).ema is None


@pytest.mark.parametrize("decay", [1.0, -0.1])
def test_invalid_decays_are_refused(decay):
    with pytest.raises(UserError, match=rf"ema\.decay is {decay}; it must be 0 \(no average\), or above 0"):
        EmaConfig(decay=decay)
