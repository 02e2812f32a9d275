"""The start of `zaya train`: programs from the cache, and compiling while data is built, change no bit."""

import json
import pathlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache
from small_runs import small_values, write_texts

from zaya_jax import cli
from zaya_jax.errors import UserError
from zaya_jax.platform.program_cache import SETTINGS, VARIABLE
from zaya_jax.run_folder.names import METRICS_FILE
from zaya_jax.train import compiled_programs
from zaya_jax.train import setup as train_setup

STEPS = 6
TIMES = ("tokens_per_second", "model_flops_utilisation")


@pytest.fixture
def no_cache(monkeypatch):
    """Compiles every program."""
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", *SETTINGS)}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    monkeypatch.setenv(VARIABLE, "")
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def events():
    """Collects the events of jax: hits and misses of the cache."""
    found = []

    def listen(event, **_):
        found.append(event.rpartition("/")[2])

    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)


def train(folder: pathlib.Path, name: str) -> list[dict]:
    """Runs `zaya train` without the compiled programs of this process, and returns its rows of metrics."""
    values = small_values(run_folder=str(folder / name), corpus=str(folder / "corpus"))
    values["data"] |= {"source": str(folder / "texts"), "tokenizer": "byte"}
    values["train"] |= {"num_steps": STEPS, "eval_every": STEPS}
    (folder / f"{name}.json").write_text(json.dumps(values))
    jax.clear_caches()
    compiled_programs._make_programs.cache_clear()
    cli.main(["train", f"--config={folder / name}.json"])
    rows = map(json.loads, (folder / name / METRICS_FILE).read_text().splitlines())
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


@pytest.mark.usefixtures("no_cache")
def test_a_start_from_the_cache_has_the_bits_of_one_that_compiles(monkeypatch, tmp_path, events):
    write_texts(tmp_path / "texts")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "programs"))
    rows = train(tmp_path, "compiled")
    stored = events.count("cache_misses")
    assert stored > 10
    assert "cache_hits" not in events
    events.clear()
    assert train(tmp_path, "cached") == rows
    assert events.count("cache_hits") == stored
    # `zaya ckpt diff` exits if a bit differs.
    cli.main(["ckpt", "diff", *(f"{tmp_path / name}:{STEPS}" for name in ("compiled", "cached"))])


@pytest.mark.parametrize("is_missing", [True, False])
def test_the_step_compiles_while_a_missing_corpus_is_built(monkeypatch, tmp_path, is_missing, capsys):
    order = []

    def compile_step(self, config, first):
        order.append(f"step {first.first_step + 1}")

    def open_data(config):
        order.append("data")
        raise UserError("no data")

    monkeypatch.setattr(compiled_programs.RunPrograms, "_compile", compile_step)
    monkeypatch.setattr(train_setup, "open_data", open_data)
    write_texts(tmp_path / "texts")
    if not is_missing:
        (tmp_path / "corpus").mkdir()
    with pytest.raises(SystemExit):
        train(tmp_path, "run")
    assert "no data" in capsys.readouterr().err
    assert order == (["step 1", "data"] if is_missing else ["data"])


def test_nothing_is_compiled_for_a_missing_source(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(compiled_programs.RunPrograms, "start_compiling", lambda *_: pytest.fail("compiled"))
    with pytest.raises(SystemExit):
        train(tmp_path, "run")
    assert "texts" in capsys.readouterr().err
