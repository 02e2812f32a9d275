"""Whole runs: repeated, killed, resumed, finished, overwritten. All comparisons are bitwise.

The runs share compiled programs through a cache on disk: a run would spend a minute compiling what
it then runs for two seconds. What is compared is the same program on the same data.
"""

import dataclasses
import json
import math
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache
from quick_compilation import FOLDER
from small_runs import build_small_corpus, small_config, small_values

import zaya_jax
from zaya_jax import cli
from zaya_jax.checkpoint import load_run, newest_step
from zaya_jax.commands.train import follow_ups, report
from zaya_jax.config import Config, TrainConfig
from zaya_jax.data.corpora.shards import Corpus
from zaya_jax.data.reading.loader import evaluation_batches
from zaya_jax.data.sources.text_sources import open_source
from zaya_jax.data.tokenizers.tokenizer import ByteTokenizer
from zaya_jax.model.zaya import Zaya
from zaya_jax.platform.shell import zaya_command
from zaya_jax.run_folder.events import read_events
from zaya_jax.run_folder.names import BEGAN, METRICS_FILE, SAMPLES_FILE
from zaya_jax.train.metrics.files import MetricsWriter, bits_per_byte, read_metrics, text_bytes
from zaya_jax.train.step.step_metrics import MAX_ROUTER_ROWS, has_router_row
from zaya_jax.train.trainer import TrainResult, train

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Metrics that do not depend on what was learned.
TIMES = ("tokens_per_second", "model_flops_utilisation")
LIMIT_SECONDS = 300


@pytest.fixture(scope="module")
def compile_cache(tmp_path_factory):
    """Compiles every program once, here and, through the environment, in separate processes."""
    settings = {
        "jax_compilation_cache_dir": os.environ.get(FOLDER) or str(tmp_path_factory.mktemp("compiled")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield {name.upper(): str(value) for name, value in settings.items()}
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return build_small_corpus(tmp_path_factory.mktemp("data") / "corpus")


@pytest.fixture(scope="module")
def undisturbed(corpus, compile_cache, tmp_path_factory) -> TrainResult:
    run_folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    return train(small_config(run_folder=run_folder, corpus=corpus.folder))


@pytest.fixture
def finished(undisturbed, tmp_path) -> Config:
    """Copies the undisturbed run to another folder."""
    config = _config(undisturbed, tmp_path / "run")
    shutil.copytree(undisturbed.config.run_folder, config.run_folder)
    (pathlib.Path(config.run_folder) / "config.json").write_text(config.to_text())
    return config


def _config(result: TrainResult, run_folder: pathlib.Path) -> Config:
    return small_config(run_folder=run_folder, corpus=result.corpus.folder)


def _rows(run_folder: str | pathlib.Path) -> list[dict]:
    """Returns all rows of metrics.jsonl without timings."""
    lines = (pathlib.Path(run_folder) / METRICS_FILE).read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def _assert_same(ours, theirs) -> None:
    """Compares trees bitwise."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for path, x in jax.tree_util.tree_leaves_with_path(ours):
        y = dict(jax.tree_util.tree_leaves_with_path(theirs))[path]
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes(), jax.tree_util.keystr(path)


def _contents(folder: str | pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in pathlib.Path(folder).rglob("*") if path.is_file()}


def test_a_run_writes_its_files(undisturbed):
    folder = pathlib.Path(undisturbed.config.run_folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        "checkpoints",
        "config.json",
        "events.jsonl",
        "metrics.jsonl",
        "routers.jsonl",
        "tensorboard",
    ]
    assert Config.from_text((folder / "config.json").read_text()) == undisturbed.config
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["28", "30"]
    assert [path.name[:16] for path in (folder / "tensorboard").iterdir()] == ["events.out.tfeve"]


def test_metrics_have_every_step_once(undisturbed):
    rows = _rows(undisturbed.config.run_folder)
    assert [row["step"] for row in rows if row["kind"] == "train"] == list(range(1, 31))
    assert [row["step"] for row in rows if row["kind"] == "validation"] == [10, 20, 30]
    assert all(math.isfinite(value) for row in rows for key, value in row.items() if key != "kind")


def test_a_row_of_the_router_has_all_tokens_of_its_step_in_each_layer(undisturbed):
    of_router, of_train = (read_metrics(undisturbed.config.run_folder, kind) for kind in ("router", "train"))
    assert [row["step"] for row in of_router] == list(range(1, 31))
    for row, printed in zip(of_router, of_train, strict=True):
        counts_LX = np.array(row["counts"])
        # Four sequences of 64 tokens, two layers, two experts and the class that skips.
        assert counts_LX.shape == (2, 3)
        assert (counts_LX.sum(axis=1) == 4 * 64).all()
        assert counts_LX[:, -1].sum() / counts_LX.sum() == pytest.approx(printed["skipped"])
        assert np.mean(row["entropy"]) == pytest.approx(printed["router_entropy"], abs=1e-4)


def test_the_number_of_router_rows_is_limited():
    for log_every, num_steps in ((10, 123_457), (1, 1000), (3, 100)):
        config = TrainConfig(log_every=log_every, num_steps=num_steps)
        steps = [step for step in range(1, num_steps + 1) if has_router_row(config, step)]
        assert steps[0] == 1
        assert steps[-1] == num_steps
        assert min(num_steps // log_every, 500) < len(steps) <= MAX_ROUTER_ROWS + 2
        assert all(step % log_every == 0 for step in steps[1:-1])


def test_the_first_event_has_user_host_and_versions(undisturbed):
    (began,) = [event for event in read_events(undisturbed.config.run_folder) if event["event"] == BEGAN]
    assert began["host"] == socket.gethostname()
    assert began["user"]
    assert began["device"] == jax.devices()[0].device_kind
    assert began["versions"]["jax"] == jax.__version__
    assert set(began["versions"]) == {"zaya_jax", "jax", "jaxlib", "orbax-checkpoint"}


def test_a_sample_is_kept_once(undisturbed, finished, capsys):
    config = dataclasses.replace(finished, train=dataclasses.replace(finished.train, sample_tokens=5))
    for _ in range(2):
        report(dataclasses.replace(undisturbed, config=config))
    (line,) = (pathlib.Path(finished.run_folder) / SAMPLES_FILE).read_text().splitlines()
    sample = json.loads(line)
    assert (sample["step"], sample["temperature"]) == (30, 0.7)
    assert sample["text"] in capsys.readouterr().out


def test_the_loss_falls(undisturbed):
    losses = [row["loss"] for row in read_metrics(undisturbed.config.run_folder, "train")]
    assert losses[0] == pytest.approx(math.log(264), rel=0.05)  # knows nothing yet
    assert losses[-1] < 0.75 * losses[0]
    assert undisturbed.validation_bits_per_byte < 8 * 0.75


def test_lines_have_means_and_files_have_single_steps(undisturbed, tmp_path, capsys):
    """A line every eight steps, compared with a run that logs each step."""
    values = json.loads(_config(undisturbed, tmp_path / "seldom").to_text())
    values["train"]["log_every"] = 8
    seldom = train(Config.from_dict(values))
    every = {row["step"]: row for row in _rows(undisturbed.config.run_folder) if row["kind"] == "train"}
    rows = [row for row in _rows(seldom.config.run_folder) if row["kind"] == "train"]
    assert rows == [every[step] for step in (1, 8, 16, 24, 30)]

    pattern = r"step (\d+)/30 \| loss ([\d.]+) \| ([\d.]+) bits/byte \|"
    lines = re.findall(pattern, capsys.readouterr().out)
    firsts = {1: 1, 8: 2, 16: 9, 24: 17, 30: 25}
    assert [int(step) for step, *_ in lines] == list(firsts)
    for step, *shown in lines:
        steps = range(firsts[int(step)], int(step) + 1)
        means = [np.mean([every[i][name] for i in steps]) for name in ("loss", "bits_per_byte")]
        # Batches differ by a few of 250 targets and bytes, because documents end in them.
        assert [float(x) for x in shown] == pytest.approx(means, rel=5e-3)
    assert abs(every[8]["loss"] - np.mean([every[i]["loss"] for i in range(2, 9)])) > 0.1


def test_another_seed_gives_another_run(undisturbed, tmp_path):
    """Otherwise the comparisons here would be meaningless."""
    values = {**json.loads(_config(undisturbed, tmp_path / "other").to_text())}
    values["train"] |= {"seed": 1, "eval_every": 30, "checkpoint_every": 30}
    other = train(Config.from_dict(values))
    assert _rows(other.config.run_folder)[0]["loss"] != _rows(undisturbed.config.run_folder)[0]["loss"]


def _write_config_file(path: pathlib.Path, config: Config) -> pathlib.Path:
    path.write_text(
        "import json\n\nimport ml_collections\n\n\ndef get_config():\n"
        f"    return ml_collections.ConfigDict(json.loads({config.to_text()!r}))\n"
    )
    return path


def _command(file: pathlib.Path, environment: dict[str, str]) -> dict:
    return {
        "args": [sys.executable, "-m", "zaya_jax.cli", "train", f"--config={file}"],
        "env": {**os.environ, **environment, "PYTHONPATH": str(ROOT)},
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
    }


def _kill_at(step: int, run_folder: str, command: dict) -> None:
    """Runs a command until its metrics have the complete row of a step, and then kills it."""
    process = subprocess.Popen(**command)
    deadline = time.monotonic() + LIMIT_SECONDS
    try:
        while _last_step(run_folder) < step:
            assert process.poll() is None, process.stdout.read().decode()
            assert time.monotonic() < deadline, f"step {step} is not reached after {LIMIT_SECONDS} s"
            time.sleep(0.001)
    finally:
        process.kill()
        process.stdout.close()
        process.wait(LIMIT_SECONDS)
    assert process.returncode == -signal.SIGKILL


def _stop_behind(step: int, number: int, run_folder: str, command: dict) -> tuple[int, str]:
    """Returns exit code and output of a command that receives a signal when its metrics have a step's row."""
    process = subprocess.Popen(**command)
    deadline = time.monotonic() + LIMIT_SECONDS
    while _last_step(run_folder) < step:
        assert process.poll() is None, process.stdout.read().decode()
        assert time.monotonic() < deadline, f"step {step} is not reached after {LIMIT_SECONDS} s"
        time.sleep(0.001)
    process.send_signal(number)
    output = process.communicate(timeout=LIMIT_SECONDS)[0].decode()
    return process.returncode, output


@pytest.mark.slow
def test_a_run_stopped_twice_and_killed_equals_an_uninterrupted_one(
    undisturbed, compile_cache, tmp_path, capsys
):
    """Steps 4, 8, ... are saved anyway, but it may stop at any step. Step 23 is after an evaluation and a
    checkpoint at the same step, 20."""
    config = _config(undisturbed, tmp_path / "stopped")
    command = _command(_write_config_file(tmp_path / "stopped.py", config), compile_cache)
    for number, exit_code, behind in ((signal.SIGTERM, 75, 3), (signal.SIGINT, 130, 12)):
        code, output = _stop_behind(behind, number, config.run_folder, command)
        assert code == exit_code, output
        (step,) = map(
            int, re.findall(r"saved at step (\d+); run the same command again to resume\n$", output)
        )
        assert newest_step(config.run_folder) == step == _last_step(config.run_folder)
    _kill_at(23, config.run_folder, command)
    assert 23 <= _last_step(config.run_folder) < config.train.num_steps

    train(config)
    assert "resuming at step" in capsys.readouterr().out
    assert _rows(config.run_folder) == _rows(undisturbed.config.run_folder)
    _assert_same(load_run(config.run_folder).variables, undisturbed.state.variables)


@pytest.fixture(scope="module")
def other_corpus(tmp_path_factory) -> Corpus:
    return build_small_corpus(tmp_path_factory.mktemp("data") / "other")


def _phased_values(run_folder: pathlib.Path, corpus: Corpus, other: Corpus) -> dict:
    """Nine steps of half a batch and three of a whole; then longer sequences of another mixture.

    The network is the smallest there is: each batch size and phase compiles a step of its own.
    """
    values = small_values(run_folder=str(run_folder), corpus=str(corpus.folder))
    del values["train"]["num_steps"]
    values["model"] |= {"num_hidden_layers": 1, "layer_pattern": ("hybrid",), "router": "linear"}
    values["optimizer"]["name"] = "adamw"
    both = {"name": "both", "corpora": (str(corpus.folder), str(other.folder)), "weights": (2, 1)}
    values["data"]["mixtures"] = (both,)
    values["phases"] = (
        {"name": "short", "steps": 12, "data": {"batch_ramp": ((9, 128),)}},
        {
            "name": "long",
            "tokens": 14 * 256,
            "model": {"rope_theta": 1e6},
            "data": {"mixture": "both", "sequence_length": 128, "batch_size": 2},
            "optimizer": {"schedule": "linear", "warmup_steps": 0, "weight_decay": 0.01, "beta1": 0.8},
            "balancing": {"learning_rate": 1e-2},
        },
    )
    return values


@pytest.fixture(scope="module")
def undisturbed_phases(corpus, other_corpus, compile_cache, tmp_path_factory) -> TrainResult:
    run_folder = tmp_path_factory.mktemp("runs") / "phases"
    return train(Config.from_dict(_phased_values(run_folder, corpus, other_corpus)))


@pytest.mark.slow
def test_phases_and_batch_ramp_are_trained(undisturbed_phases):
    rows = [row for row in _rows(undisturbed_phases.config.run_folder) if row["kind"] == "train"]
    assert [row["phase"] for row in rows] == ["short"] * 12 + ["long"] * 14
    sizes = np.diff([row["tokens"] for row in rows], prepend=0)
    assert sizes.tolist() == [128] * 9 + [256] * 17
    rates = [row["learning_rate"] for row in rows]
    assert rates[:4] == pytest.approx([0.75e-3, 1.5e-3, 2.25e-3, 3e-3])  # four steps of warm-up
    assert (rates[11], rates[12], rates[-1]) == pytest.approx((2e-4, 3e-3, 2e-4))
    assert np.diff(rates[12:]).tolist() == pytest.approx([(2e-4 - 3e-3) / 13] * 13, rel=1e-3)
    assert undisturbed_phases.model.config.rope_theta == 1e6
    assert load_run(undisturbed_phases.config.run_folder).config.model.rope_theta == 1e6


# At step 9 the checkpoint of step 8 is being written, and that of step 4 is complete, because Orbax writes
# one at a time: the run resumes in the ramp, from 4 or 8. At step 17 it resumes from 12, the boundary, or
# from 16.
@pytest.mark.campaign
def test_a_run_killed_in_its_ramp_and_after_a_phase_resumes(
    undisturbed_phases, other_corpus, compile_cache, tmp_path, capsys
):
    config = Config.from_dict(_phased_values(tmp_path / "killed", undisturbed_phases.corpus, other_corpus))
    command = _command(_write_config_file(tmp_path / "killed.py", config), compile_cache)
    _kill_at(9, config.run_folder, command)
    assert 9 <= _last_step(config.run_folder) < config.train.num_steps
    _kill_at(17, config.run_folder, command)
    assert 17 <= _last_step(config.run_folder) < config.train.num_steps

    train(config)
    output = capsys.readouterr().out
    assert "resuming at step 1" in output
    assert "phase long: steps 13 to 26, sequences of 128, RoPE base 1,000,000, from mixture both" in output
    assert _rows(config.run_folder) == _rows(undisturbed_phases.config.run_folder)
    _assert_same(load_run(config.run_folder).variables, undisturbed_phases.state.variables)


def _last_step(run_folder: str) -> int:
    path = pathlib.Path(run_folder) / METRICS_FILE
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


def test_a_run_resumes_from_its_newest_complete_checkpoint(undisturbed, finished):
    """As after a crash in step 30: the checkpoint and the last row of metrics are incomplete."""
    folder = pathlib.Path(finished.run_folder)
    shutil.rmtree(folder / "checkpoints" / "30")
    (folder / "checkpoints" / "30.orbax-checkpoint-tmp").mkdir()
    path = folder / METRICS_FILE
    path.write_text(path.read_text()[:-20])
    resumed = train(finished)
    assert _rows(finished.run_folder) == _rows(undisturbed.config.run_folder)
    _assert_same(resumed.state.variables, undisturbed.state.variables)
    _assert_same(
        [resumed.state.optimizer, resumed.state.balancer, jax.random.key_data(resumed.state.key)],
        [undisturbed.state.optimizer, undisturbed.state.balancer, jax.random.key_data(undisturbed.state.key)],
    )


def test_a_finished_run_is_reported_and_unchanged(undisturbed, finished, capsys):
    before = _contents(finished.run_folder)
    result = train(finished)
    assert f"run {finished.run_folder} is finished: it has all 30 steps" in capsys.readouterr().out
    assert _contents(finished.run_folder) == before
    assert result.validation_bits_per_byte == undisturbed.validation_bits_per_byte
    _assert_same(result.state.variables, undisturbed.state.variables)


def test_overwrite_removes_the_old_run_and_a_repeated_run_has_the_same_bits(undisturbed, finished):
    stray = pathlib.Path(finished.run_folder) / "tensorboard" / "old"
    stray.write_text("")
    path = pathlib.Path(finished.run_folder) / METRICS_FILE
    path.write_text('{"step": 1, "kind": "train", "loss": 0.0}\n')
    again = train(finished, overwrite=True)
    assert not stray.exists()
    assert _rows(finished.run_folder) == _rows(undisturbed.config.run_folder)
    _assert_same(again.state.variables, undisturbed.state.variables)


def test_held_out_loss_scores_every_byte_once(corpus, undisturbed):
    """Windows split documents, and the last batch is partly padding."""
    split, num_targets, num_bytes = corpus.validation, 0.0, 0.0
    tokenizer = ByteTokenizer()
    token_bytes = np.zeros(264, np.int32)
    token_bytes[: tokenizer.vocab_size] = tokenizer.token_bytes()
    for batch in evaluation_batches(corpus, split="validation", sequence_length=64, batch_size=4):
        num_bytes += text_bytes(np.asarray(batch.targets_BT), np.asarray(batch.weights_BT), token_bytes)
        num_targets += float(np.asarray(batch.weights_BT).sum())
    assert num_bytes == split.text_bytes > 5000
    assert num_targets == split.tokens - split.documents  # only the first token of a document is not a target
    for row in read_metrics(undisturbed.config.run_folder, "validation"):
        assert row["bits_per_byte"] == pytest.approx(
            row["loss"] * num_targets / num_bytes / math.log(2), rel=1e-12
        )


def test_bits_per_byte_by_hand():
    # Two tokens of 3 and 1 bytes, each with probability 1/4: 2 bits per token, 4 bits for 4 bytes.
    assert bits_per_byte(2 * math.log(4), 4.0) == pytest.approx(1)
    assert bits_per_byte(0.0, 0.0) == math.inf
    targets, weights = np.array([[2, 1, 0]]), np.array([[1.0, 1.0, 0.0]])
    assert text_bytes(targets, weights, np.array([9, 1, 3])) == 4


def test_a_writer_continues_after_the_completed_steps(tmp_path):
    for first_step, steps in ((0, (1, 2, 3)), (2, (3, 4))):
        with MetricsWriter(tmp_path, first_step=first_step) as writer:
            for step in steps:
                writer.write(step, "train", {"loss": float(first_step + step)})
    losses = [(row["step"], row["loss"]) for row in read_metrics(tmp_path, "train")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 5.0), (4, 6.0)]


def test_the_proposed_prompt_is_held_out_text(undisturbed, corpus, capsys):
    report(undisturbed)
    *_, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"next: {zaya_command()} generate ")
    folder, prompt = shlex.split(last)[-2:]
    assert folder == undisturbed.config.run_folder
    assert len(prompt) > len("--prompt=def f(")
    files = [file.read_text() for file in corpus.folder.with_name("corpus_texts").iterdir()]
    begun = [text for text in files if text.startswith(prompt.removeprefix("--prompt="))]
    assert 1 <= len(begun) < len(files) / 2
    held_out = evaluation_batches(corpus, split="validation", sequence_length=64, batch_size=4)
    tokens = np.concatenate([np.asarray(batch.tokens_BT).ravel() for batch in held_out])
    assert any(text[:200] in ByteTokenizer().decode(tokens.tolist()) for text in begun)


def test_generate_reads_the_run(undisturbed, capsys):
    """Through the command line and from disk, it generates the same as the weights in memory."""
    tokenizer = ByteTokenizer()
    prompt = "def f7(é"
    options = ["--prompt", prompt, "--temperature", "0", "--max-new-tokens", "40"]
    cli.main(["generate", undisturbed.config.run_folder, *options])
    tokens = zaya_jax.generate(
        Zaya(undisturbed.config.model, undisturbed.config.execution),
        undisturbed.state.variables,
        [tokenizer.bos_id, *tokenizer.encode(prompt)],
        max_new_tokens=40,
        temperature=0,
        eos_id=tokenizer.eos_id,
    )
    assert capsys.readouterr().out == prompt + tokenizer.decode(tokens) + "\n"
    assert len(tokenizer.decode(tokens)) > 10


def test_proposed_commands_fit_the_run(undisturbed, tmp_path, monkeypatch):
    """They name a text only if it exists, so that they work when pasted."""
    monkeypatch.chdir(tmp_path)

    def hints(*, init_from=None, **corpus):
        train = dataclasses.replace(undisturbed.config.train, init_from=init_from)
        config = dataclasses.replace(undisturbed.config, train=train, run_folder="my run")
        corpus = dataclasses.replace(undisturbed.corpus, **corpus)
        return follow_ups(dataclasses.replace(undisturbed, config=config, corpus=corpus))

    report, _ = hints()
    assert report == "zaya report 'my run'"
    (tmp_path / "README.md").write_text("text")
    _, judged, _ = hints()
    assert judged == "zaya eval 'my run' --text README.md"
    *_, generate = hints(source=open_source("stdlib").description)
    assert shlex.split(generate)[-1] == "--prompt=def get(self, name, default=None):"
    # With initial weights: a report of both runs. On chats: a chat.
    assert hints(init_from="the base", chat_template="a template") == [
        "zaya report 'the base' 'my run'",
        "zaya chat 'my run'",
    ]
