"""Resolved presets, and configs as text.

`python tests/config/test_config.py --regenerate` rewrites tests/golden/<preset>.json; review the diff.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import pytest

from zaya_jax.config import (
    BalancingConfig,
    Config,
    DataConfig,
    ExecutionConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    differences,
)
from zaya_jax.errors import UserError
from zaya_jax.fields import build
from zaya_jax.options import load_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests" / "golden"
PRESETS = sorted(path.stem for path in (ROOT / "configs").glob("*.py"))

# Every field differs from its default; every optional one occurs with and without a value.
UNUSUAL = Config.from_dict(
    {
        "run_folder": "runs/Ünusual",
        "model": {
            "layer_pattern": ["hybrid_sliding", "hybrid"],
            "sliding_window": 7,
            "router": "linear",
            "skip_class": "identity",
            "lm_head_bias": True,
            "rms_norm_eps": 1e-7,
        },
        "data": {"source": "texts", "seed": 2**32 - 1},
        "optimizer": {
            "name": "adamw",
            "learning_rate": 0.1 + 0.2,
            "momentum_dtype": "bfloat16",
            "newton_schulz": "polar_express",
            "newton_schulz_dtype": "bfloat16",
        },
        "balancing": {"learning_rate": 0},
        "train": {
            "num_steps": 2001,
            "eval_sequences": 3,
            "z_loss": 1e-4,
            "checkpoint_minutes": 7.5,
            "keep_every": 1000,
            "keep_best": True,
            "min_free_gib": 0.25,
        },
        "execution": {
            "experts_implementation": "ragged_dot",
            "remat": "attention_and_experts",
            "gradient_dtype": "bfloat16",
            "loss_chunk": 7,
        },
    }
)


def _resolve(preset: str) -> Config:
    return load_config(f"configs/{preset}.py", [])


def _recorded() -> set[str]:
    return {path.stem for path in GOLDEN.glob("*.json")} - {"tiny_loss"}


def test_there_are_presets():
    assert "tiny" in PRESETS
    assert "zaya1_8b" in PRESETS


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_resolves_as_recorded(preset):
    recorded = (GOLDEN / f"{preset}.json").read_text()
    assert _resolve(preset).to_text() == recorded, (
        "to accept the change: python tests/config/test_config.py --regenerate"
    )


def test_every_golden_file_has_a_preset():
    assert _recorded() == set(PRESETS)


@pytest.mark.parametrize("config", [UNUSUAL, *map(_resolve, PRESETS)])
def test_text_and_back(config):
    assert Config.from_text(config.to_text()) == config


@pytest.mark.parametrize(
    "section",
    [Config, ModelConfig, DataConfig, OptimizerConfig, BalancingConfig, TrainConfig, ExecutionConfig],
)
def test_defaults_are_valid(section):
    """Defaults also have the types of their fields, which are only checked for explicit values."""
    assert build(section, dataclasses.asdict(section()), "") == section()


def test_text_has_every_field():
    values = json.loads(UNUSUAL.to_text())
    for field in dataclasses.fields(Config):
        section = getattr(UNUSUAL, field.name)
        if dataclasses.is_dataclass(section):
            assert list(values[field.name]) == [f.name for f in dataclasses.fields(section)]
    assert values["model"]["sliding_window"] == 7
    assert values["data"]["mixture"] is None


def test_differences_name_field_old_and_new():
    ours = dataclasses.replace(UNUSUAL, run_folder="there", data=dataclasses.replace(UNUSUAL.data, seed=3))
    assert list(map(str, differences(ours, UNUSUAL))) == [
        "run_folder: runs/Ünusual -> there",
        "data.seed: 4294967295 -> 3",
    ]
    assert differences(UNUSUAL, UNUSUAL) == []


@pytest.mark.parametrize(
    ("option", "section", "field", "value"),
    [
        ("--config.run_folder=runs/12", None, "run_folder", "runs/12"),
        ("--config.data.corpus=12", "data", "corpus", "12"),
        ("--config.data.source=None", "data", "source", None),
        ("--config.model.layer_pattern=('hybrid',)", "model", "layer_pattern", ("hybrid",)),
        ("--config.model.sliding_window=None", "model", "sliding_window", None),
        ("--config.model.lm_head_bias=True", "model", "lm_head_bias", True),
        ("--config.optimizer.learning_rate=1", "optimizer", "learning_rate", 1.0),
        ("--config.optimizer.name=adamw", "optimizer", "name", "adamw"),
        (
            "--config.execution.experts_implementation=blocked",
            "execution",
            "experts_implementation",
            "blocked",
        ),
    ],
)
def test_an_option_sets_its_field(option, section, field, value):
    options = ["--config.model.layer_pattern=['hybrid']", option]
    config = load_config("configs/tiny.py", options)
    actual = getattr(config if section is None else getattr(config, section), field)
    assert (actual, type(actual)) == (value, type(value))


@pytest.mark.parametrize(
    ("options", "source"),
    [
        ("", "stdlib"),
        ("corpus=corpora/docs", None),
        ("corpus=corpora/docs source=docs", "docs"),
        ("source=docs corpus=corpora/docs", "docs"),
        ("source=None corpus=corpora/docs", None),
        ("source=docs", "docs"),
        ("corpus=corpora/stdlib_2048", "stdlib"),  # as the file has it already
        ("corpus=corpora/docs corpus=corpora/stdlib_2048", "stdlib"),  # the last one wins
        ("seed=1", "stdlib"),
    ],
)
def test_the_source_of_a_config_file_is_only_for_its_own_corpus(options, source):
    overrides = [f"--config.data.{option}" for option in options.split()]
    assert load_config("configs/tiny.py", overrides).data.source == source


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ("", 2048),
        ("tokenizer=byte", None),
        ("tokenizer=tokenizers/mine/tokenizer.json", None),
        ("tokenizer=tokenizers/mine/tokenizer.json tokenizer_vocab_size=512", 512),
        ("tokenizer=tokenizers/stdlib_2048/tokenizer.json", 2048),  # as the file has it already
        ("corpus=corpora/notes source=notes", None),  # the corpus has another name
        ("source=stdlib", 2048),
    ],
)
def test_only_the_tokenizer_of_the_config_file_is_trained(options, size):
    """Another tokenizer that is named but does not exist is a typo."""
    overrides = [f"--config.data.{option}" for option in options.split()]
    assert load_config("configs/tiny.py", overrides).data.tokenizer_vocab_size == size


def test_reading_threads_may_be_none_but_not_negative():
    Config.from_dict({"execution": {"read_threads": 0}})
    with pytest.raises(ValueError, match=r"execution\.read_threads is -1; it must be 0 or above"):
        Config.from_dict({"execution": {"read_threads": -1}})


def test_a_tokenizer_to_be_trained_must_fit_the_network():
    with pytest.raises(
        ValueError, match=r"tokenizer_vocab_size is 4096; it must be at most model\.vocab_size, 2048"
    ):
        load_config("configs/tiny.py", ["--config.data.tokenizer_vocab_size=4096"])
    with pytest.raises(ValueError, match=r"tokenizer_vocab_size is 0; it must be above 0"):
        DataConfig(tokenizer_vocab_size=0)


def test_a_config_has_no_source_unless_it_sets_one():
    assert DataConfig(corpus="corpora/docs").source is None


@pytest.mark.parametrize("options", [(), ("--config.data.corpus=corpora/docs",)])
def test_the_config_of_a_run_is_the_same_with_the_same_options(options, tmp_path):
    """The source of its corpus stays, whether the corpus exists or not, so that the run can resume."""
    config = load_config("configs/tiny.py", options)
    (tmp_path / "config.json").write_text(config.to_text())
    assert load_config("configs/tiny.py", options) == config
    assert load_config(str(tmp_path / "config.json"), options) == config


@pytest.mark.parametrize("name", ["other.json", "my_run.JSON", "saved", "run.cfg", "copy.py"])
def test_json_is_recognized_whatever_the_file_name(name, tmp_path):
    """Also with `false`, which Python does not know."""
    config = load_config("configs/tiny.py", ["--config.execution.scan_layers=False"])
    (tmp_path / name).write_text(config.to_text())
    assert "false" in config.to_text()
    assert load_config(str(tmp_path / name), []) == config


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_json_has_only_the_fields_that_were_set(encoding, tmp_path):
    """They are validated together with those of the command line, like those of a Python file."""
    file = tmp_path / "mine.json"
    file.write_text('\n {"optimizer": {"warmup_steps": 3000}}', encoding=encoding)
    config = load_config(str(file), ["--config.train.num_steps=5000"])
    assert (config.optimizer.warmup_steps, config.train.num_steps) == (3000, 5000)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.json", "", "a.json is not JSON"),
        ("a.json", "null", "a.json holds a NoneType; it must be a JSON object"),
        ("a.txt", "[1, 2]", "a.txt holds a list; it must be a JSON object"),
        ("a.cfg", '{"model": {,}}', "a.cfg is not JSON"),
        ("a.json", '{"seed": 1, "seed": 2}', '"seed" twice'),
        ("a.yaml", "model:\n  hidden_size 64\n", "a.yaml is not a config file: line 1: SyntaxError"),
        ("a.toml", "[model]\nhidden_size = 64\n", "a.toml is not JSON"),
        ("a.py", "def get_config():\n    return nothing\n", "line 2: NameError: name 'nothing'"),
        ("a.py", "x = 1\ny = int('z')\n", "line 2: ValueError: invalid literal"),
    ],
)
def test_an_invalid_config_file_is_rejected_with_its_line(name, text, sentence, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=re.escape(sentence)):
        load_config(str(tmp_path / name), [])


def test_configs_are_read_without_jax():
    """Errors in a config are reported quickly, and tools can read configs without jax."""
    code = (
        "import sys, types; package = types.ModuleType('zaya_jax'); "  # without zaya_jax/__init__.py
        f"package.__path__ = [{str(ROOT / 'zaya_jax')!r}]; sys.modules['zaya_jax'] = package; "
        "import zaya_jax.config; assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("pattern", "layers", "types"),
    [
        (("hybrid",), 3, ("hybrid",) * 3),
        (("hybrid_sliding", "hybrid"), 3, ("hybrid_sliding", "hybrid", "hybrid_sliding")),
    ],
)
def test_the_pattern_repeats_over_the_depth(pattern, layers, types):
    model = ModelConfig(layer_pattern=pattern, num_hidden_layers=layers, sliding_window=4)
    assert model.layer_types == types


def test_seeds_at_their_limits():
    assert DataConfig(seed=0).seed == 0
    assert TrainConfig(seed=2**32 - 1).seed == 2**32 - 1
    for section in (DataConfig, TrainConfig):
        for seed in (-1, 2**32):
            with pytest.raises(ValueError, match=f"seed is {seed}"):
                section(seed=seed)


def regenerate() -> None:
    """Writes the golden presets, and removes those of presets that do not exist."""
    for preset in _recorded() - set(PRESETS):
        (GOLDEN / f"{preset}.json").unlink()
    for preset in PRESETS:
        (GOLDEN / f"{preset}.json").write_text(_resolve(preset).to_text())


if __name__ == "__main__":
    if sys.argv[1:] != ["--regenerate"]:
        sys.exit("usage: python tests/config/test_config.py --regenerate")
    regenerate()
