"""The same weights through lm-eval's transformers backend and through ours: equal item by item."""

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
_CACHE, _FOLDERS = tempfile.TemporaryDirectory(), tempfile.TemporaryDirectory()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": _CACHE.name}

import jax.numpy as jnp  # noqa: E402  (datasets reads the environment variables above)
import numpy as np  # noqa: E402
from huggingface_reference import EXECUTION, build_released  # noqa: E402
from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from small_runs import small_values  # noqa: E402
from transformers import AutoTokenizer, ZayaForCausalLM  # noqa: E402

import zaya_jax  # noqa: E402
from zaya_jax import cli  # noqa: E402
from zaya_jax.checkpoint import Checkpoints, Retention, load_run  # noqa: E402
from zaya_jax.config import Config  # noqa: E402
from zaya_jax.data.chats.templates.encoding import load_chat_format  # noqa: E402
from zaya_jax.data.chats.templates.template import load_template  # noqa: E402
from zaya_jax.data.tokenizers.saved_tokenizer import save_tokenizer, saved_chat_template  # noqa: E402
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer, tokenizer_of  # noqa: E402
from zaya_jax.inference.evaluation.lm_eval_model import HarnessModel  # noqa: E402
from zaya_jax.inference.evaluation.scoring import make_scorer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
"""Warnings of lm-eval and of what it imports are for others to mend."""

ROOT = pathlib.Path(__file__).parents[2]
TASKS = ROOT / "tests/inference/evaluation/tasks"
CONTEXT = 96
"""Less than the longest question and the longest text have."""
NAMES = ["zaya_choice", "zaya_last_word", "zaya_texts", "zaya_answers", "zaya_stopped"]


SYSTEM = "Answer in one word."
ENDS = (260, 1)
"""Of a turn, and of a document, in "byte-chat"."""


@functools.cache
def run_folder(is_chat):
    """A run, trained on chats or on texts, and its export in the same folder."""
    fields = {"vocab_size": 264} if is_chat else {}
    pair = build_released(
        5,
        lm_head_bias=True,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
        num_hidden_layers=4,
        sliding_window=5,
        **fields,
    )
    folder = pathlib.Path(_FOLDERS.name) / ("chat" if is_chat else "text")
    values = small_values(run_folder=str(folder / "run"), corpus="none")
    config = dataclasses.replace(Config.from_dict(values), model=pair.config)
    variables = pair.variables
    if is_chat:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer="byte-chat"))
        # So that some answers end with their turn, and others with the end of a document.
        head = variables["params"]["head"]
        bias_V = head["bias"].at[jnp.array(ENDS)].add(8.0)
        variables = variables | {"params": variables["params"] | {"head": head | {"bias": bias_V}}}
    (folder / "run").mkdir(parents=True)
    (folder / "run/config.json").write_text(config.to_text())
    with Checkpoints(folder / "run", retention=Retention(newest=1)) as checkpoints:
        checkpoints.save(1, weights=variables, training={"step": np.int32(1)})
    if is_chat:
        template = load_template("zaya", load_tokenizer("byte-chat")).text
        save_tokenizer(folder / "run", config.data, chat_template=template)
    cli.main(["convert", str(folder / "run"), str(folder / "out"), "--dtype=float32"])
    return folder


@functools.cache
def models(is_chat):
    """The same model in lm-eval's backend and in ours."""
    folder = run_folder(is_chat)
    reference = ZayaForCausalLM.from_pretrained(folder / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "out")
    theirs = HFLM(pretrained=reference, tokenizer=tokenizer, max_length=CONTEXT, batch_size=2, device="cpu")
    run = load_run(folder / "run")
    model = zaya_jax.Zaya(run.config.model, EXECUTION)
    scorer = make_scorer(model, run.variables, length=CONTEXT, prefix_id=2, num_rows=3)
    ours = tokenizer_of(run.config.data)
    template = saved_chat_template(folder / "run")
    chat_format = None if template is None else load_chat_format(template, ours)
    return theirs, HarnessModel(scorer, ours, chat_format)


@functools.cache
def answers(is_ours, num_fewshot, is_chat=False, in_one_turn=False):
    """Returns lm-eval's results of all tasks at once, with each question and answer."""
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    with contextlib.chdir(TASKS):
        return simple_evaluate(
            models(is_chat)[is_ours],
            tasks=NAMES,
            task_manager=manager,
            num_fewshot=num_fewshot,
            bootstrap_iters=0,
            log_samples=True,
            apply_chat_template=is_chat,
            system_instruction=SYSTEM if is_chat else None,
            fewshot_as_multiturn=is_chat and not in_one_turn,
        )


@pytest.mark.parametrize(
    "asked", [(0,), (2,), (0, True), (2, True), (2, True, True)], ids=lambda asked: "-".join(map(str, asked))
)
@pytest.mark.parametrize("name", NAMES)
def test_both_backends_answer_each_item_equally(name, asked):
    theirs, ours = (answers(is_ours, *asked) for is_ours in (False, True))
    pairs = list(zip(theirs["samples"][name], ours["samples"][name], strict=True))
    assert len(pairs) >= 3
    for their, our in pairs:
        assert our["arguments"] == their["arguments"]
        for their_answer, our_answer in zip(their["resps"], our["resps"], strict=True):
            expect_alike(our_answer[0], their_answer[0])
    for metric, value in theirs["results"][name].items():
        assert ours["results"][name][metric] == (
            pytest.approx(value, rel=1e-4) if isinstance(value, float) else value
        )


def test_the_tasks_would_reveal_a_difference_of_backends():
    samples = answers(True, 0)["samples"]
    flags = [sample["resps"][0][0][1] for sample in samples["zaya_last_word"]]
    assert flags == [False, False, True, True, False, False]
    whole, stopped = (
        [sample["resps"][0][0] for sample in samples[name]] for name in ("zaya_answers", "zaya_stopped")
    )
    assert all(whole)
    assert any(
        text.startswith(cut) and text[len(cut)] in "ae5" for text, cut in zip(whole, stopped, strict=True)
    )
    for name, field in (("zaya_choice", "question"), ("zaya_texts", "text"), ("zaya_answers", "question")):
        assert max(len(sample["doc"][field].encode()) for sample in samples[name]) > CONTEXT


@pytest.mark.parametrize(("processes", "devices"), [(1, 2), (4, 1)])
def test_answers_do_not_depend_on_the_number_of_devices(processes, devices, tmp_path):
    """Item by item: bitwise like one device, and like lm-eval's own backend."""
    for is_chat, words in ((False, []), (True, ["--apply-chat-template", f"--system-instruction={SYSTEM}"])):
        out = tmp_path / "samples.jsonl"
        launch = ["launch", f"--processes={processes}", f"--devices={devices}", "--", "eval"]
        settings = [f"--context={CONTEXT}", "--batch-size=3", "--task-folder=.", f"--samples={out}"]
        ended = subprocess.run(
            [sys.executable, "-m", "zaya_jax.cli", *launch, str(run_folder(is_chat) / "run"), *settings,
             f"--tasks={','.join(NAMES)}", "--num-fewshot=0", *words],
            cwd=TASKS, capture_output=True, text=True, check=False,
            env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        )  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        samples = [json.loads(line) for line in out.read_text().splitlines()]
        assert len(samples) == sum(map(len, answers(True, 0, is_chat)["samples"].values()))
        for sample in samples:
            alone, theirs = (
                next(
                    each
                    for each in answers(is_ours, 0, is_chat)["samples"][sample["task"]]
                    if each["doc_id"] == sample["doc_id"]
                )
                for is_ours in (True, False)
            )
            assert sample["resps"] == json.loads(json.dumps(alone["resps"]))
            for their_answer, our_answer in zip(theirs["resps"], sample["resps"], strict=True):
                of_json = our_answer[0]
                expect_alike(tuple(of_json) if isinstance(of_json, list) else of_json, their_answer[0])


def test_chat_answers_end_with_their_turn():
    texts = [
        sample["resps"][0][0]
        for asked in ((0, True), (2, True), (2, True, True))
        for sample in answers(True, *asked)["samples"]["zaya_answers"]
    ]
    assert any(len(text.encode()) < 40 for text in texts)
    assert any(text for text in texts)
    arguments = answers(True, 2, True)["samples"]["zaya_answers"][1]["arguments"][0]
    assert arguments[0].count("<|im_start|>user\n") == 3
    assert arguments[0].startswith(f"<bos><|im_start|>system\n{SYSTEM}")


def expect_alike(ours, theirs):
    """A log-probability with its greedy flag, one without, or a text."""
    if isinstance(theirs, str):
        assert ours == theirs
    elif isinstance(theirs, tuple):
        assert ours == (close_to(theirs[0]), theirs[1])
    else:
        assert ours == close_to(theirs)


def close_to(value):
    """Float32's resolution at a logit of 100 is 8e-6, a large part of the log-probability of a nearly certain
    token.
    """
    return pytest.approx(value, rel=1e-4, abs=1e-5)
