"""Model cards: huggingface_hub reads their metadata, and their figures are those of the run."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from huggingface_hub import ModelCard
from small_runs import build_small_corpus, small_values
from small_weights import plausible_variables, small_config, zaya

import zaya_jax
from zaya_jax.checkpoint import Checkpoints, Retention
from zaya_jax.config import Config
from zaya_jax.convert.card_facts import ORIGIN, figures_of_file
from zaya_jax.convert.model_card import CardFacts, CardFigure, model_card
from zaya_jax.errors import UserError

STEP = 10
TOKENS = 2 * 128 + 4 * 256 + 4 * 512
"""Tokens of 10 steps: a ramp of 2, 4 full batches of 4 x 64, and 4 of the second phase, 4 x 128."""
ROWS = [
    {"step": 5, "kind": "validation", "phase": "train", "loss": 3.5, "bits_per_byte": 5.0},
    {"step": 8, "kind": "validation", "phase": "late", "loss": 9.0, "bits_per_byte": 9.0},
    {"step": 8, "kind": "train", "loss": 1.0},
    {"step": 7, "kind": "tasks", "phase": "late", "arith/acc": 0.25, "arith/acc_norm": "NaN"},
    # After a rollback: the rows that the run kept.
    {"step": 8, "kind": "validation", "phase": "late", "loss": 2.5, "bits_per_byte": 3.6, "ema/loss": 2.25},
    {"step": 12, "kind": "validation", "phase": "late", "loss": 1.0, "bits_per_byte": 1.4},
]


def write_run(folder):
    """Writes a run of two phases on a mixture, with a checkpoint of step 10 and a table of metrics."""
    corpora = [str(folder.with_name(name)) for name in ("code", "old|prose")]
    build_small_corpus(folder.with_name("code"))
    values = small_values(run_folder=str(folder), corpus=corpora[0])
    values["data"] |= {
        "mixtures": ({"name": "both", "corpora": tuple(corpora), "weights": (3.0, 1.0)},),
        "batch_ramp": ((2, 128),),
    }
    values["tasks"] = {"names": ("arith",), "limit": 7, "num_fewshot": 3}
    values["train"] |= {"init_from": str(folder.with_name("base")), "eval_sequences": 5}
    values["train"].pop("num_steps")
    late = {"data": {"mixture": "both", "sequence_length": 128, "batch_ramp": ()}}
    values["phases"] = ({"name": "train", "steps": 6}, {"name": "late", "steps": 8, **late})
    config = Config.from_dict(values)
    folder.mkdir()
    (folder / "config.json").write_text(config.to_text())
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS) + '{"step": 9, "ki')
    origin = folder.with_name("base")
    origin.mkdir()
    (origin / ORIGIN).write_text('{"converted_from": "Org/Base at revision 12ab", "license": "mit"}')
    with Checkpoints(folder, retention=Retention(newest=1)) as checkpoints:
        weights = jax.tree.map(jax.device_put, plausible_variables(config.model, 1))
        checkpoints.save(STEP, weights=weights, training={"step": np.int32(STEP)})


@pytest.fixture(scope="module", name="root")
def fixture_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("cards")
    write_run(root / "tuned")
    return root


def figures(card: ModelCard) -> list[tuple]:
    return [
        (each.dataset_name, each.metric_type, each.metric_value, each.dataset_args["settings"])
        for each in card.data.eval_results
    ]


def test_huggingface_hub_reads_the_card_of_a_run(root):
    measured = CardFigure("book.txt", "bits_per_byte", 1.5, "12 tokens, contexts of 64 tokens")
    evaluation = {"step": STEP, "weights": "raw", "figures": [dataclasses.asdict(measured)]}
    (root / "eval.json").write_text(json.dumps(evaluation))
    zaya(f"convert {root}/tuned {root}/native --eval {root}/eval.json")
    card = ModelCard.load(root / "native/README.md")
    data = card.data
    assert (data.license, data.base_model, data.library_name) == ("mit", "Org/Base", "transformers")
    assert (data.pipeline_tag, data.model_name) == ("text-generation", "tuned")
    held_out = "step 8, 5 held-out sequences of 128 tokens"
    assert figures(card) == [
        ("code", "loss", 2.5, held_out),
        ("code", "bits_per_byte", 3.6, held_out),
        ("arith", "acc", 0.25, "step 7, 3 shots, the first 7 examples of each task, contexts of 128 tokens"),
        ("book.txt", "bits_per_byte", 1.5, "12 tokens, contexts of 64 tokens"),
    ]
    assert f"Trained on {TOKENS:,} tokens in 10 of 14 steps." in card.content
    assert "| late | 7 to 10 | 2,048 | 4 x 128 | Muon |" in card.content
    assert "| late | code | 75.00% | 1,536 |" in card.content
    # Its folder is not there, and a bar would end the cell.
    assert "| late | old\\|prose | 25.00% | 512 |  |  |" in card.content
    assert str(root) not in card.content
    assert 'AutoModelForCausalLM.from_pretrained("FOLDER")' in card.content
    # What the hub would receive from its own library.
    assert ModelCard(str(card)).data.to_dict() == data.to_dict()


def test_a_license_travels_with_the_weights(root):
    config = small_config()
    zaya_jax.save_pytorch(root / "plain", zaya_jax.Zaya(config), plausible_variables(config, 0))
    assert ModelCard.load(root / "plain/README.md").data.license == "unknown"
    zaya(f"convert {root}/plain {root}/licensed --layout native --license apache-2.0")
    zaya(f"convert {root}/licensed {root}/run")
    zaya(f"convert {root}/run {root}/again")
    assert ModelCard.load(root / "again/README.md").data.license == "apache-2.0"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--license MIT-0", '--license is "MIT-0"; it must be an identifier'),
        ("--layout zaya --eval eval.json", "--eval adds figures to a model card, which a run folder"),
        ("--eval {root}/other.json", "has figures of step 9, raw weights, but those of step 10"),
        ("--eval {root}/tuned/config.json", "was not written by zaya eval --json"),
    ],
)
def test_refused_options(root, words, sentence, capsys):
    (root / "other.json").write_text('{"step": 9, "weights": "raw", "figures": []}')
    with pytest.raises(SystemExit, match="2"):
        zaya(f"convert {root}/tuned {root}/refused {words.format(root=root)}")
    assert sentence in capsys.readouterr().err
    assert not (root / "refused").exists()


def test_figures_of_a_file_have_their_types(tmp_path):
    (tmp_path / "eval.json").write_text('{"step": 1, "weights": "ema", "figures": [3]}')
    with pytest.raises(UserError, match="figures is 3"):
        figures_of_file(str(tmp_path / "eval.json"), step=1, weights="ema")


def test_names_that_yaml_does_not_allow():
    facts = CardFacts("a: \ud800\x7f\n---\n'\"", figures=(CardFigure("é\u2028\t#", "loss", np.pi, "{a: 1}"),))
    card = ModelCard(model_card(small_config(), facts, (), dtype="float32", layout="native").decode())
    assert card.data.model_name == "a: ???---?'\""
    assert figures(card) == [("é??#", "loss", np.pi, "{a: 1}")]


def test_a_figure_that_is_not_a_number_is_not_metadata():
    facts = CardFacts(figures=(CardFigure("text", "loss", float("nan"), ""),))
    card = ModelCard(model_card(small_config(), facts, (), dtype="float32", layout="native").decode())
    assert card.data.eval_results is None
    assert "| text | loss | nan |" in card.content
