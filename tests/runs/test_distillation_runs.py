"""Runs that learn from a teacher: predictions that are stored once, resumed, verified, and learned."""

import dataclasses
import json
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import build_small_corpus, make_base, small_values

from zaya_jax.checkpoint import load_run
from zaya_jax.config import Config
from zaya_jax.data.corpora.shards import open_corpus
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.model.zaya import Zaya
from zaya_jax.run_folder.names import TEACHER_FOLDER
from zaya_jax.train.metrics.files import read_metrics
from zaya_jax.train.trainer import train

# Whole runs: the newest jax has its own list of them.
pytestmark = pytest.mark.slow

STEPS, HALF, TOP_K, TEMPERATURE = 12, 6, 8, 1.5


@dataclasses.dataclass(frozen=True)
class Trained:
    folder: pathlib.Path
    config: Config
    state: object

    def named(self, name: str, num_steps: int = STEPS, **sections) -> Config:
        of_train = dataclasses.replace(self.config.train, num_steps=num_steps)
        run_folder = str(self.folder / name)
        return dataclasses.replace(self.config, **{"run_folder": run_folder, "train": of_train} | sections)

    def rows(self, kind="train", name="run"):
        return read_metrics(self.folder / name, kind)


@pytest.fixture(name="trained", scope="module")
def fixture_trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distillation")
    build_small_corpus(folder / "corpus", num_files=4)
    values = small_values(run_folder=str(folder / "run"), corpus=str(folder / "corpus"))
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",)}
    # Another architecture, whose predictions are far from those of new weights.
    teacher = values | {"model": values["model"] | {"hidden_size": 48, "num_experts": 3}}
    make_base(folder / "teacher", teacher)
    values["train"] |= {"num_steps": STEPS, "checkpoint_every": HALF, "eval_every": HALF,
                        "eval_sequences": 4, "update_norms": False}  # fmt: skip
    values["optimizer"] = {"name": "adamw", "warmup_steps": 0, "schedule": "constant", "learning_rate": 1e-2}
    values["distillation"] = {"teacher": str(folder / "teacher"), "top_k": TOP_K, "temperature": TEMPERATURE}
    config = Config.from_dict(values)
    return Trained(folder, config, train(config).state)


def test_a_student_learns_its_teachers_predictions(trained):
    """From the divergence of new weights, and not the text: the teacher knows nothing of it."""
    first, *_, last = trained.rows()
    assert last["kl"] < 0.6 * first["kl"]
    assert first["loss"] == pytest.approx(TEMPERATURE**2 * first["kl"], rel=1e-5)
    assert first["bits_per_byte"] > 0
    before, after = trained.rows("validation")
    assert after["kl"] < before["kl"]
    assert {"loss", "kl", "text_nats", "bits_per_byte"} <= after.keys()


def test_stored_predictions_are_those_of_the_teacher(trained):
    loaded, corpus = load_run(trained.folder / "teacher"), open_corpus(trained.config.data.corpus)
    (rows,) = evaluation_batches(corpus, split="validation", sequence_length=64, batch_size=4, limit=4)
    batch = jax.tree.map(jnp.asarray, rows)
    model = Zaya(loaded.config.model, loaded.config.execution)
    logits_BTV = jax.jit(lambda: model.apply(
        loaded.variables, batch.tokens_BT, positions_BT=batch.positions_BT, segments_BT=batch.segments_BT
    ).logits_BTV)()  # fmt: skip
    log_probs_BTV = np.asarray(jax.nn.log_softmax(logits_BTV / TEMPERATURE), np.float64)
    (part,) = (trained.folder / "run" / TEACHER_FOLDER).glob("*-validation-*")
    raw, size = part.read_bytes(), 64 * TOP_K * (2 + 4) + 16
    for row in range(4):
        record = raw[row * size : (row + 1) * size]
        tokens_TK = np.frombuffer(record[: 64 * TOP_K * 2], "<u2").reshape(64, TOP_K)
        values_TK = np.frombuffer(record[64 * TOP_K * 2 : -16], "<f4").reshape(64, TOP_K)
        expected_TK = -np.sort(-log_probs_BTV[row], axis=-1)[:, :TOP_K]
        np.testing.assert_allclose(values_TK, expected_TK, rtol=1e-4, atol=1e-4)
        of_tokens_TK = np.take_along_axis(log_probs_BTV[row], tokens_TK.astype(np.int64), axis=-1)
        np.testing.assert_allclose(values_TK, of_tokens_TK, rtol=1e-4, atol=1e-4)


def test_a_resumed_run_equals_an_uninterrupted_one_and_reads_what_is_stored(trained, capsys):
    shutil.copytree(trained.folder / "run", trained.folder / "resumed")
    shutil.rmtree(trained.folder / f"resumed/checkpoints/{STEPS}")
    (trained.folder / "resumed/config.json").write_text(trained.named("resumed", HALF).to_text())
    capsys.readouterr()
    resumed = train(trained.named("resumed")).state
    assert "teacher:" not in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, resumed.stored, trained.state.stored)
    losses = [[row["loss"] for row in trained.rows(name=name)] for name in ("resumed", "run")]
    assert losses[0] == losses[1]


def test_damaged_predictions_are_reported(trained, tmp_path):
    name = tmp_path / "damaged"
    shutil.copytree(trained.folder / "run", name)
    shutil.rmtree(name / f"checkpoints/{STEPS}")
    config = dataclasses.replace(trained.config, run_folder=str(name))
    (name / "config.json").write_text(
        dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=HALF)).to_text()
    )
    (part,) = (name / TEACHER_FOLDER).glob("*-train-*")
    raw = part.read_bytes()
    part.write_bytes(bytes(byte ^ 1 for byte in raw))
    with pytest.raises(DamagedError, match=r"the teacher's predictions of window .* missing or damaged"):
        train(config)
    part.write_bytes(raw[:-1])
    with pytest.raises(DamagedError, match="the teacher's predictions, are missing or damaged"):
        train(config)


@pytest.mark.parametrize(
    ("model", "message"),
    [({"vocab_size": 300}, r"has model\.vocab_size 264, and this run 300; both must predict the same")],
)
def test_teachers_of_other_tokens_are_refused(trained, model, message):
    config = trained.named("other", model=dataclasses.replace(trained.config.model, **model))
    with pytest.raises(UserError, match=message):
        train(config)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"distillation": {"weight": 0.0}}, r"distillation\.weight is 0\.0; it must be above 0 and at most"),
        ({"distillation": {"top_k": 0}}, r"distillation\.top_k is 0"),
        (
            {"distillation": {"teacher": "t"}, "train": {"z_loss": 1e-4}},
            r"the distillation loss does not support it",
        ),
        (
            {"distillation": {"teacher": "t"}, "dpo": {"beta": 0.1}, "train": {"init_from": "b"}},
            r"a run has one of both: set dpo\.beta to 0",
        ),
    ],
)
def test_invalid_configs_are_refused(sections, message):
    with pytest.raises(UserError, match=message):
        Config.from_dict(json.loads(json.dumps(sections)))
