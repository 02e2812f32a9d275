"""Field names of other trainers are errors that name our field."""

import pytest

from zaya_jax.config import Config
from zaya_jax.config.aliases import FIELD_BY_ALIAS, field_by_alias
from zaya_jax.fields import field_paths
from zaya_jax.options import load_config, split_override

PATHS = set(field_paths(Config))


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("optimizer.lr", "optimizer.learning_rate"),
        ("lr", "optimizer.learning_rate"),
        ("training.batch_size", None),  # our field name in a section that does not exist
        ("training.global_batch_size", "data.batch_size"),
        ("train.max_steps", "train.num_steps"),
        ("data.seq_len", "data.sequence_length"),
        ("training.seq_len", "data.sequence_length"),
        ("train.grad_accum", "execution.num_microbatches"),
        ("train.gradient_accumulation_steps", "execution.num_microbatches"),
        ("optimizer.grad_clip", "optimizer.clip_norm"),
        ("optimizer.min_lr", "optimizer.final_learning_rate"),
        ("model.n_layer", "model.num_hidden_layers"),
        ("model.d_model", "model.hidden_size"),
        ("train.save_interval", "train.checkpoint_every"),
        ("output_dir", "run_folder"),
    ],
)
def test_error_of_a_field_with_an_alias(name, meant):
    message = f'did you mean "{meant}"' if meant else 'unknown config field "training"; did you mean "train"'
    with pytest.raises(ValueError, match=message):
        load_config("configs/tiny.py", [f"--config.{name}=1"])


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--lr=1e-3", "--config.optimizer.learning_rate=1e-3"),
        ("--max-steps=9", "--config.train.num_steps=9"),
        ("--seq_len", "--config.data.sequence_length=VALUE"),
        ("--optimizer.lr=2", "--config.optimizer.learning_rate=2"),
        ("--gradient-accumulation-steps=4", "--config.execution.num_microbatches=4"),
        ("--batch-size=8", "--config.data.batch_size=8"),
    ],
)
def test_error_of_an_option_with_an_alias(option, meant):
    with pytest.raises(ValueError, match=f'did you mean "{meant}"'):
        split_override(option, known=["--dry-run", "--overwrite"])


def test_aliases_name_existing_fields_and_shadow_none():
    assert set(FIELD_BY_ALIAS.values()) <= PATHS
    assert not set(FIELD_BY_ALIAS) & {path.rpartition(".")[2] for path in PATHS}
    assert field_by_alias("Seq-Len") == "data.sequence_length"
    assert field_by_alias("hidden_size") is None
