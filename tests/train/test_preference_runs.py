"""Runs that learn preferences: from a file of pairs and another run's weights to what is preferred."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from small_runs import build_small_corpus, make_base, small_values

from zaya_jax.aegis.heartbeats import Heartbeats
from zaya_jax.checkpoint import run_lock
from zaya_jax.config import Config, DpoConfig
from zaya_jax.data.preference_corpus import build_preference_corpus
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.durable import Damaged
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.train.loop import train
from zaya_jax.train.metrics import read_metrics
from zaya_jax.train.opening import open_data, open_run
from zaya_jax.train.reference import ABOUT, FOLDER, compute_references, load_references
from zaya_jax.train.starting import starting_state

# Of the run, of which the newest jax has others.
pytestmark = pytest.mark.slow

STEPS, LENGTH = 9, 64


def write_pairs(path):
    """Questions to which one answer is always the better one."""
    lines = [{"prompt": f"q{i}", "chosen": "aaaa", "rejected": "bbbb"} for i in range(12)]
    path.write_text("\n".join(map(json.dumps, lines)))


@dataclasses.dataclass(frozen=True)
class Trained:
    folder: pathlib.Path
    config: Config
    result: object

    def again(self, name, num_steps=STEPS, **sections):
        of_train = dataclasses.replace(self.config.train, num_steps=num_steps)
        run_folder = str(self.folder / name)
        return dataclasses.replace(self.config, **{"run_folder": run_folder, "train": of_train} | sections)

    def rows(self, kind="train", name="run"):
        return read_metrics(self.folder / name, kind)


@pytest.fixture(name="trained", scope="module")
def fixture_trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preferences")
    write_pairs(folder / "pairs.jsonl")
    report = build_preference_corpus(
        folder / "pairs",
        source=folder / "pairs.jsonl",
        tokenizer=load_tokenizer("byte-chat"),
        sequence_length=LENGTH,
    )
    assert report.corpus.train.num_blocks == 11
    values = small_values(run_folder=str(folder / "base"), corpus=str(folder / "pairs"))
    make_base(folder / "base", values)
    values["data"] |= {"sequence_length": LENGTH, "tokenizer": "byte-chat"}
    values["train"] |= {"num_steps": STEPS, "checkpoint_every": 3, "eval_every": 9}
    config = Config.from_dict(
        values
        | {
            "run_folder": str(folder / "run"),
            "dpo": {"beta": 0.1},
            "optimizer": {"name": "adamw", "warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-2},
            "train": values["train"] | {"init_from": str(folder / "base"), "update_norms": False},
        }
    )
    return Trained(folder, config, train(config))


def test_a_run_begins_at_log_2_and_learns_what_is_preferred(trained):
    first, *_, last = trained.rows()
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert abs(first["rewards/margins"]) < 1e-5
    assert last["rewards/accuracies"] == 1.0
    assert last["loss"] < first["loss"] / 2
    assert last["rewards/margins"] > 1
    for row in trained.rows():
        margin = row["rewards/chosen"] - row["rewards/rejected"]
        assert row["rewards/margins"] == pytest.approx(margin, abs=1e-4)
        assert row["logps/chosen"] < 0
    assert {"loss", "rewards/accuracies", "rewards/margins", "bits_per_byte"} <= trained.rows("validation")[
        0
    ].keys()


def test_a_run_goes_on_as_if_nothing_had_been_and_repeats_its_steps(trained, capsys):
    train(trained.again("resumed", 6))
    assert "reference: 12 windows of pairs under the weights of" in capsys.readouterr().out
    resumed = train(trained.again("resumed"), replay_check=3)
    said = capsys.readouterr().out
    assert "replayed" in said
    assert "reference:" not in said
    ours, theirs = resumed.state, trained.result.state
    jax.tree.map(
        np.testing.assert_array_equal, (ours.stored, ours.optimizer), (theirs.stored, theirs.optimizer)
    )
    assert [row["loss"] for row in trained.rows(name="resumed")] == [row["loss"] for row in trained.rows()]


@pytest.fixture(name="begun")
def fixture_begun(trained):
    """A run that ended before its first checkpoint, opened again; and what its reference must be."""
    config = trained.again("begun")
    shutil.copytree(
        trained.config.run_folder, config.run_folder, ignore=shutil.ignore_patterns("checkpoints")
    )
    reference = pathlib.Path(config.run_folder) / FOLDER
    with run_lock(config.run_folder) as lock:
        yield (
            open_run(config, data_mesh(jax.devices()[:1]), lock, heartbeats=Heartbeats(), overwrite=False),
            reference,
        )
    shutil.rmtree(config.run_folder)


def test_a_pass_that_was_killed_goes_on(begun, capsys):
    """What is there is taken and what is not is computed; of other weights nothing is taken."""
    run, reference = begun
    state = starting_state(run, Heartbeats())
    expected = {path.name: path.read_bytes() for path in reference.iterdir()}
    assert len(expected) == 3

    def said():
        compute_references(run, state, Heartbeats())
        assert {path.name: path.read_bytes() for path in reference.iterdir()} == expected
        return capsys.readouterr().out

    assert "reference:" not in said()
    (part,) = reference.glob("*-train-*")
    part.write_bytes(part.read_bytes()[:-1])
    assert "reference: 11 windows" in said()
    about = json.loads((reference / ABOUT).read_text())
    (reference / ABOUT).write_text(json.dumps(about | {"weights": "0"}))
    assert "reference: 12 windows" in said()


def test_a_reference_that_is_damaged_or_of_other_weights_is_named(begun):
    run, reference = begun
    (part,) = reference.glob("*-validation-*")
    raw, about = part.read_bytes(), (reference / ABOUT).read_text()

    def check(name):
        with pytest.raises(
            Damaged, match=rf"{name}, what the reference gives .* is missing or not as it was"
        ):
            load_references(run)

    part.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:])
    check(part.name)
    part.write_bytes(raw)
    assert len(load_references(run)) == 2
    (reference / ABOUT).write_text(about.replace(json.loads(about)["weights"], "0"))
    check(".*-train-000000000")


def test_what_is_learned_must_be_what_a_corpus_holds(trained, tmp_path):
    texts = build_small_corpus(tmp_path / "texts")
    tokens = dataclasses.replace(trained.config.data, corpus=str(texts.folder), tokenizer="byte")
    with pytest.raises(
        ValueError, match=r"dpo\.beta is 0\.1, and .*texts holds no preferences; zaya data pref"
    ):
        open_data(dataclasses.replace(trained.config, data=tokens))
    with pytest.raises(
        ValueError, match=r"dpo\.beta is 0, and .*pairs holds preferences, of which the rejected"
    ):
        open_data(dataclasses.replace(trained.config, dpo=DpoConfig()))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"dpo": {"beta": -0.1}}, r"dpo\.beta is -0\.1; it must be 0 \(the next token is learned\) or above"),
        ({"dpo": {"beta": 0.1}}, r"dpo\.beta is 0\.1 and train\.init_from None; it must name the run"),
        (
            {"dpo": {"beta": 0.1}, "train": {"init_from": "runs/base", "z_loss": 1e-4}},
            r"train\.z_loss is 0\.0001 and dpo\.beta 0\.1; the loss of pairs has none, so it must be 0",
        ),
        (
            {
                "dpo": {"beta": 0.1},
                "train": {"init_from": "runs/base"},
                "optimizer": {"warmup_steps": 1},
                "phases": [{"name": "one", "steps": 3}],
            },
            r"dpo\.beta is 0\.1 and there are 1 phases; a run that learns preferences has none",
        ),
    ],
)
def test_a_config_that_cannot_be(sections, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config.from_dict(sections)
