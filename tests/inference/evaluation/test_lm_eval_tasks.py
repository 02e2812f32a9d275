"""`zaya eval --tasks` from the command line, with and without lm-eval."""

import contextlib
import importlib.util
import json
import pathlib
import re

import pytest
from small_runs import make_base, small_values

from zaya_jax import cli
from zaya_jax.inference.engine.sampling_params import SamplingParams

TASKS = pathlib.Path(__file__).parent / "tasks"
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is an extra: pip install -e '.[eval]'"
)
pytestmark = pytest.mark.filterwarnings("default")
"""Warnings of lm-eval and of what it imports are for others to mend."""


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run").resolve() / "random"
    make_base(folder, small_values(run_folder=str(folder), corpus="none"))
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch, tmp_path):
    settings = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path)}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)


def evaluate(run_folder, *words):
    with contextlib.chdir(TASKS):  # the paths in the task files start here
        cli.main(["eval", str(run_folder), "--task-folder=.", *words])


@needs_harness
def test_metrics_are_printed_and_written(run_folder, tmp_path, capsys):
    words = ("--tasks=zaya_ch*,zaya_texts,zaya_stopped", "--context=96", "--limit=2", "--num-fewshot=1")
    evaluate(run_folder, *words, f"--json={tmp_path}/out.json", f"--samples={tmp_path}/answers.jsonl")
    actual = json.loads((tmp_path / "out.json").read_text())
    assert actual["context"] == 96
    results = actual["tasks"]["results"]
    assert set(results) == {"zaya_choice", "zaya_texts", "zaya_stopped"}
    assert results["zaya_choice"]["acc,none"] in (0, 0.5, 1)
    assert actual["tasks"]["n-samples"]["zaya_choice"]["effective"] == 2
    assert actual["tasks"]["n-shot"]["zaya_choice"] == 1
    figures = [tuple(figure.values()) for figure in actual["figures"]]
    settings = "1 shots, the first 2 examples, contexts of 96 tokens"
    assert ("zaya_choice", "acc", results["zaya_choice"]["acc,none"], settings) in figures
    out = capsys.readouterr().out
    assert f"{results['zaya_texts']['bits_per_byte,none']:.4f}" in out
    assert "acc_norm" in out
    samples = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {sample["task"] for sample in samples} == set(results)
    assert "samples" not in actual["tasks"]


@needs_harness
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--tasks=zaya_answers", "--context=40"),
            "a task generates 40 new tokens, and the context is 40; increase --context",
        ),
        (
            ("--tasks=zaya_odd", "--context=300"),
            "a task generates with num_beams; zaya eval supports until, max_gen_toks, do_sample",
        ),
        (
            ("--tasks=zaya_choice", "--apply-chat-template"),
            "--apply-chat-template needs a chat template, and the run has none; name one with --template",
        ),
    ],
)
def test_unsupported_tasks_are_one_error_line(run_folder, capsys, words, sentence):
    with pytest.raises(SystemExit, match="2"):
        evaluate(run_folder, *words)
    assert f"zaya: eval: {sentence}" in capsys.readouterr().err


@needs_harness
def test_generation_params():
    from zaya_jax.inference.evaluation.lm_eval_model import generation_params

    def params(max_new_tokens, **fields):
        return SamplingParams(max_new_tokens=max_new_tokens, stop_token_ids=(7,), **fields)

    assert generation_params({}, 300, (7,)) == params(256)
    greedy = {"until": ["a", "b"], "do_sample": False, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 8}
    assert generation_params(greedy, 300, (7,)) == params(8, stop=("a", "b"))
    drawn = {"until": "a", "do_sample": True, "top_k": 4, "max_gen_toks": 9}
    assert generation_params(drawn, 300, (7,)) == params(9, stop=("a",), temperature=1.0, top_k=4)
    nucleus = {"temperature": 0.5, "top_p": 0.9}
    assert generation_params(nucleus, 300, (7,)) == params(256, **nucleus)


def test_without_lm_eval_the_error_names_the_install_command(run_folder, capsys, monkeypatch):
    actual = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else actual(name))
    with pytest.raises(SystemExit, match="2"):
        evaluate(run_folder, "--tasks=zaya_choice")
    sentence = r"zaya: eval: --tasks needs lm-eval, which is not installed: .*pip install 'lm-eval>="
    assert re.search(sentence, capsys.readouterr().err)
