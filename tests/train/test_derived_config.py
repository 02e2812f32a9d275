"""Fields that a run derives when it starts: its schedule from the data, and the storage of frozen weights."""

import dataclasses
import json

import pytest
from small_runs import small_values

from zaya_jax.config import Config, differences, resume_errors
from zaya_jax.data.corpora.ensure import ensure_corpus
from zaya_jax.data.reading.loader import num_sequences
from zaya_jax.train.derived_config import with_base_dtype, with_schedule


@pytest.fixture(name="values")
def fixture_values(tmp_path):
    """A run on 40 chats of a file, which it packs itself."""
    with (tmp_path / "chats.jsonl").open("w") as file:
        for number in range(40):
            turns = [
                ("user", f"What is {number}?"),
                ("assistant", "It is " + "one and " * (number % 9)),
            ]
            messages = [{"role": role, "content": content} for role, content in turns]
            file.write(json.dumps({"messages": messages}) + "\n")
    values = small_values(run_folder=str(tmp_path / "run"), corpus=str(tmp_path / "corpus"))
    values["data"] |= {"source": str(tmp_path / "chats.jsonl"), "source_kind": "chats"}
    values["data"] |= {"tokenizer": "byte-chat", "sequence_length": 256}
    return values


def test_steps_warmup_and_evaluations_follow_from_the_chats(values):
    values["train"] |= {"epochs": 2.5, "evaluations": 3}
    values["optimizer"] |= {"warmup_fraction": 0.25, "warmup_steps": 0}
    config = Config.from_dict(values)
    derived = with_schedule(config)
    corpus = ensure_corpus(config.data)
    windows = num_sequences(corpus, "train", 256)
    assert corpus.chat_template is not None
    assert corpus.train.documents + corpus.validation.documents == 40
    steps = -(-(5 * windows + 1) // 2 // config.data.batch_size)
    assert derived.train.num_steps == steps > 4
    assert derived.optimizer.warmup_steps == steps // 4
    assert derived.train.eval_every == derived.train.checkpoint_every == -(-steps // 3)
    # The same command resumes: what is derived again is what the run began with.
    assert with_schedule(derived) == derived == with_schedule(Config.from_text(derived.to_text()))
    assert not differences(with_schedule(config), derived)


def test_a_config_without_these_fields_is_unchanged(values):
    assert with_schedule(Config.from_dict(values)) == Config.from_dict(values)


def test_phases_have_their_own_lengths(values):
    values["train"] |= {"epochs": 1.0}
    del values["train"]["num_steps"]
    values["optimizer"] = {"warmup_steps": 0}
    with pytest.raises(ValueError, match=r"train\.epochs is 1\.0.* runs with phases or a mixture"):
        Config.from_dict(values | {"phases": ({"name": "only", "steps": 2},)})


def test_frozen_weights_are_stored_as_the_run_began(values, tmp_path):
    """A config from before the field existed means float32, with which its run resumes bitwise."""
    values["execution"]["dtype"] = "bfloat16"
    config = Config.from_dict(values | {"lora": {"rank": 2}})
    new = with_base_dtype(config, overwrite=False)
    assert new.lora.base_dtype == "bfloat16"
    old = json.loads(config.to_text())
    del old["lora"]["base_dtype"]
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text(json.dumps(old))
    resumed = with_base_dtype(config, overwrite=False)
    assert resumed.lora.base_dtype == "float32"
    held = Config.from_text(json.dumps(old))
    assert not differences(resumed, held)
    assert with_base_dtype(config, overwrite=True) == new
    changed = dataclasses.replace(config, lora=dataclasses.replace(config.lora, base_dtype="bfloat16"))
    (error,) = resume_errors(with_base_dtype(changed, overwrite=False), held, newest_step=1)
    assert error == "lora.base_dtype is bfloat16 and was float32: it changes what is learned"
