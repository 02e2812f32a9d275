"""Runs on preferences: from a file of pairs and initial weights to learned preferences."""

import dataclasses
import json
import math
import pathlib
import shutil

import jax
import numpy as np
import pytest
from small_runs import build_small_corpus, make_base, small_values

from zaya_jax.checkpoint import run_lock
from zaya_jax.config import Config, DpoConfig
from zaya_jax.data.chats.labeled_corpus import build_labeled_corpus
from zaya_jax.data.chats.preference_corpus import build_preference_corpus
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.errors import DamagedError
from zaya_jax.parallel.mesh import data_mesh
from zaya_jax.run_folder.names import REFERENCE_FILE, REFERENCE_FOLDER
from zaya_jax.train.heartbeats import Heartbeats
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.reference_logprobs import compute_references, load_references
from zaya_jax.train.setup import open_data, prepare_run
from zaya_jax.train.starting_state import starting_state
from zaya_jax.train.trainer import train

# Whole runs: the newest jax has its own list of them.
pytestmark = pytest.mark.slow

STEPS, LENGTH = 9, 64


def write_pairs(path):
    """Questions with one answer that is always preferred."""
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


def test_a_run_starts_at_log_2_and_learns_the_preferred_answers(trained):
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


def test_orpo_learns_without_a_reference(trained, capsys):
    """Also from random weights: no reference is computed, stored or read."""
    of_train = {"init_from": None, "num_steps": STEPS, "checkpoint_every": STEPS}
    config = dataclasses.replace(
        trained.config,
        run_folder=str(trained.folder / "orpo"),
        dpo=DpoConfig(beta=0.1, loss_type="orpo"),
        train=dataclasses.replace(trained.config.train, **of_train),
    )
    train(config)
    assert "reference:" not in capsys.readouterr().out
    assert not (trained.folder / "orpo" / REFERENCE_FOLDER).exists()
    first, *_, last = trained.rows(name="orpo")
    assert last["loss"] < first["loss"]
    assert last["nll_loss"] < first["nll_loss"]
    assert last["log_odds_chosen"] > first["log_odds_chosen"]
    assert last["rewards/accuracies"] == 1.0
    # Rewards are mean log-probabilities per token.
    assert last["rewards/chosen"] == pytest.approx(0.1 * last["logps/chosen"], rel=1e-4)
    assert {"nll_loss", "log_odds_ratio", "bits_per_byte"} <= trained.rows("validation", "orpo")[0].keys()


@pytest.mark.campaign
def test_kto_learns_from_pairs_that_are_split(trained):
    report = build_labeled_corpus(
        trained.folder / "votes",
        source=trained.folder / "pairs.jsonl",
        tokenizer=load_tokenizer("byte-chat"),
        sequence_length=LENGTH,
    )
    assert report.corpus.unpaired
    data = dataclasses.replace(trained.config.data, corpus=str(trained.folder / "votes"))
    dpo = DpoConfig(beta=0.1, loss_type="kto", desirable_weight=1.2)
    train(trained.again("kto", data=data, dpo=dpo))
    first, *_, last = trained.rows(name="kto")
    # No ratio has changed: 1 - sigmoid(0) of both kinds, with their weights.
    assert 0.5 <= first["loss"] <= 0.6
    assert abs(first["kl"]) < 1e-5
    assert last["loss"] < first["loss"]
    assert last["rewards/margins"] > 0.5
    assert last["rewards/chosen"] > last["rewards/rejected"]
    assert {"kl", "rewards/margins", "bits_per_byte"} <= trained.rows("validation", "kto")[0].keys()


def test_losses_need_their_kind_of_corpus(trained):
    with pytest.raises(ValueError, match=r'loss_type is "kto", and .*pairs does not hold labeled answers; '):
        open_data(dataclasses.replace(trained.config, dpo=DpoConfig(beta=0.1, loss_type="kto")))


def test_a_resumed_preference_run_equals_an_uninterrupted_one_and_replays_its_steps(trained, capsys):
    train(trained.again("resumed", 6))
    assert "reference: 12 windows of pairs under the weights of" in capsys.readouterr().out
    resumed = train(trained.again("resumed"), replay_check=3)
    printed = capsys.readouterr().out
    assert "replayed" in printed
    assert "reference:" not in printed
    ours, theirs = resumed.state, trained.result.state
    jax.tree.map(
        np.testing.assert_array_equal, (ours.stored, ours.optimizer), (theirs.stored, theirs.optimizer)
    )
    assert [row["loss"] for row in trained.rows(name="resumed")] == [row["loss"] for row in trained.rows()]


@pytest.fixture(name="begun")
def fixture_begun(trained):
    """Returns a run that ended before its first checkpoint, and its expected reference."""
    config = trained.again("begun")
    shutil.copytree(
        trained.config.run_folder, config.run_folder, ignore=shutil.ignore_patterns("checkpoints")
    )
    reference = pathlib.Path(config.run_folder) / REFERENCE_FOLDER
    with run_lock(config.run_folder) as lock:
        yield (
            prepare_run(config, data_mesh(jax.devices()[:1]), lock, heartbeats=Heartbeats(), overwrite=False),
            reference,
        )
    shutil.rmtree(config.run_folder)


def test_a_killed_reference_pass_is_resumed(begun, capsys):
    """Existing parts are read, missing ones are computed, and parts of other weights are ignored."""
    run, reference = begun
    state = starting_state(run, Heartbeats())
    expected = {path.name: path.read_bytes() for path in reference.iterdir()}
    assert len(expected) == 3

    def printed():
        compute_references(run, state, Heartbeats())
        assert {path.name: path.read_bytes() for path in reference.iterdir()} == expected
        return capsys.readouterr().out

    assert "reference:" not in printed()
    (part,) = reference.glob("*-train-*")
    part.write_bytes(part.read_bytes()[:-1])
    assert "reference: 11 windows" in printed()
    about = json.loads((reference / REFERENCE_FILE).read_text())
    (reference / REFERENCE_FILE).write_text(json.dumps(about | {"weights": "0"}))
    assert "reference: 12 windows" in printed()


def test_damaged_or_foreign_references_are_reported(begun):
    run, reference = begun
    (part,) = reference.glob("*-validation-*")
    raw, about = part.read_bytes(), (reference / REFERENCE_FILE).read_text()

    def check(name):
        with pytest.raises(DamagedError, match=rf"{name}, the reference for .* is missing or damaged"):
            load_references(run)

    part.write_bytes(raw[:-2] + bytes([raw[-2] ^ 1]) + raw[-1:])
    check(part.name)
    part.write_bytes(raw)
    assert len(load_references(run)) == 2
    (reference / REFERENCE_FILE).write_text(about.replace(json.loads(about)["weights"], "0"))
    check(".*-train-000000000")


def test_preference_runs_need_a_preference_corpus(trained, tmp_path):
    texts = build_small_corpus(tmp_path / "texts")
    tokens = dataclasses.replace(trained.config.data, corpus=str(texts.folder), tokenizer="byte")
    with pytest.raises(
        ValueError,
        match=r"dpo\.beta is 0\.1, and .*texts holds no preferences; build such a corpus with zaya data pref",
    ):
        open_data(dataclasses.replace(trained.config, data=tokens))
    with pytest.raises(ValueError, match=r"dpo\.beta is 0, and .*pairs holds preferences, whose rejected"):
        open_data(dataclasses.replace(trained.config, dpo=DpoConfig()))


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"dpo": {"beta": -0.1}}, r"dpo\.beta is -0\.1; it must be 0 \(next-token loss\) or above"),
        ({"dpo": {"beta": 0.1}}, r"dpo\.beta is 0\.1 and train\.init_from None; it must name the run"),
        (
            {"dpo": {"beta": 0.1}, "train": {"init_from": "runs/base", "z_loss": 1e-4}},
            r"train\.z_loss is 0\.0001 and dpo\.beta 0\.1; the preference loss does not support it, so it",
        ),
        (
            {
                "dpo": {"beta": 0.1},
                "train": {"init_from": "runs/base"},
                "optimizer": {"warmup_steps": 1},
                "phases": [{"name": "one", "steps": 3}],
            },
            r"dpo\.beta is 0\.1 and there are 1 phases; preference optimization does not support phases",
        ),
    ],
)
def test_invalid_configs_are_refused(sections, sentence):
    with pytest.raises(ValueError, match=sentence):
        Config.from_dict(sections)
