"""`zaya eval --tasks` from the command line, with and without lm-eval."""

import contextlib
import importlib.util
import json
import pathlib

import pytest
from small_runs import make_base, small_values

from zaya_jax import cli

TASKS = pathlib.Path(__file__).parent / "tasks"
needs_harness = pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is an extra: pip install 'zaya_jax[eval]'"
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
    with contextlib.chdir(TASKS):  # where the tasks' own paths begin
        cli.main(["eval", str(run_folder), "--task-folder=.", *words])


@needs_harness
def test_figures_of_tasks_are_said_and_written(run_folder, tmp_path, capsys):
    words = ("--tasks=zaya_ch*,zaya_texts,zaya_stopped", "--context=96", "--limit=2", "--num-fewshot=1")
    evaluate(run_folder, *words, f"--json={tmp_path}/out.json", f"--samples={tmp_path}/answers.jsonl")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["context"] == 96
    results = found["tasks"]["results"]
    assert set(results) == {"zaya_choice", "zaya_texts", "zaya_stopped"}
    assert results["zaya_choice"]["acc,none"] in (0, 0.5, 1)
    assert found["tasks"]["n-samples"]["zaya_choice"]["effective"] == 2
    assert found["tasks"]["n-shot"]["zaya_choice"] == 1
    out = capsys.readouterr().out
    assert f"{results['zaya_texts']['bits_per_byte,none']:.4f}" in out
    assert "acc_norm" in out
    samples = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert {sample["task"] for sample in samples} == set(results)
    assert "samples" not in found["tasks"]


@needs_harness
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ("--tasks=zaya_answers", "--context=40"),
            "a task asks for 40 new tokens, and the context is 40; --context",
        ),
        (
            ("--tasks=zaya_odd", "--context=300"),
            "a task generates with num_beams; zaya eval knows until, max_gen_toks, do_sample",
        ),
        (
            ("--tasks=zaya_choice", "--apply-chat-template"),
            "--apply-chat-template needs a chat template, and the run has none; --template has one",
        ),
    ],
)
def test_what_a_task_cannot_have_is_one_sentence(run_folder, capsys, words, sentence):
    with pytest.raises(SystemExit, match="2"):
        evaluate(run_folder, *words)
    assert f"zaya: eval: {sentence}" in capsys.readouterr().err


@needs_harness
def test_what_a_task_wants_is_asked_for_in_our_words():
    from zaya_jax.inference.harness import Wanted, wanted_of

    assert wanted_of({}, 300) == Wanted((), 256, 0.0, None, None)
    greedy = {"until": ["a", "b"], "do_sample": False, "temperature": 0.7, "top_p": 0.9, "max_new_tokens": 8}
    assert wanted_of(greedy, 300) == Wanted(("a", "b"), 8, 0.0, None, None)
    drawn = {"until": "a", "do_sample": True, "top_k": 4, "max_gen_toks": 9}
    assert wanted_of(drawn, 300) == Wanted(("a",), 9, 1.0, 4, None)
    assert wanted_of({"temperature": 0.5, "top_p": 0.9}, 300) == Wanted((), 256, 0.5, None, 0.9)


def test_without_lm_eval_is_said_what_to_install(run_folder, capsys, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else found(name))
    with pytest.raises(SystemExit, match="2"):
        evaluate(run_folder, "--tasks=zaya_choice")
    sentence = "--tasks needs lm-eval, which is not installed: pip install 'zaya_jax[eval]'"
    assert f"zaya: eval: {sentence}" in capsys.readouterr().err
