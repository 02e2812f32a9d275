"""The same weights through lm-eval's own backend for transformers and through ours: item by item the same."""

import contextlib
import functools
import os
import pathlib
import tempfile

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")
_CACHE = tempfile.TemporaryDirectory()
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": _CACHE.name}

from huggingface_reference import EXECUTION, build_released  # noqa: E402  (datasets reads what is set above)
from lm_eval.evaluator import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from transformers import AutoTokenizer, ZayaForCausalLM  # noqa: E402

import zaya_jax  # noqa: E402
from zaya_jax.data.tokenizer import ByteTokenizer  # noqa: E402
from zaya_jax.inference.harness import HarnessModel  # noqa: E402
from zaya_jax.inference.scoring import make_scorer  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default")
"""Warnings of lm-eval and of what it imports are for others to mend."""

TASKS = pathlib.Path(__file__).parents[1] / "inference" / "tasks"
CONTEXT = 96
"""Less than the longest question and the longest text have."""
NAMES = ["zaya_choice", "zaya_last_word", "zaya_texts", "zaya_answers", "zaya_stopped"]


@functools.cache
def models():
    """One network behind lm-eval's backend, and behind ours."""
    pair = build_released(
        5,
        lm_head_bias=True,
        layer_types=["hybrid_sliding", "hybrid"] * 2,
        num_hidden_layers=4,
        sliding_window=5,
    )
    model = zaya_jax.Zaya(pair.config, EXECUTION)
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "out")
        zaya_jax.save_pytorch(out, model, pair.variables, dtype="float32", tokenizer="byte")
        reference = ZayaForCausalLM.from_pretrained(out).eval()
        tokenizer = AutoTokenizer.from_pretrained(out)
    theirs = HFLM(pretrained=reference, tokenizer=tokenizer, max_length=CONTEXT, batch_size=2, device="cpu")
    scorer = make_scorer(model, pair.variables, length=CONTEXT, prefix_id=2, num_rows=3)
    return theirs, HarnessModel(scorer, ByteTokenizer())


@functools.cache
def answers(is_ours, num_fewshot):
    """What lm-eval says of all tasks at once, with each question and answer."""
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    with contextlib.chdir(TASKS):
        return simple_evaluate(
            models()[is_ours],
            tasks=NAMES,
            task_manager=manager,
            num_fewshot=num_fewshot,
            bootstrap_iters=0,
            log_samples=True,
        )


@pytest.mark.parametrize("num_fewshot", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_each_item_is_answered_alike(name, num_fewshot):
    theirs, ours = (answers(is_ours, num_fewshot) for is_ours in (False, True))
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


def test_the_tasks_ask_what_tells_two_backends_apart():
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


def expect_alike(ours, theirs):
    """A log-probability with its greedy flag, one without, or a text."""
    if isinstance(theirs, str):
        assert ours == theirs
    elif isinstance(theirs, tuple):
        assert ours == (close_to(theirs[0]), theirs[1])
    else:
        assert ours == close_to(theirs)


def close_to(value):
    """Float32's step at a logit of 100 is 8e-6: of a certain token's log-probability that is a large part."""
    return pytest.approx(value, rel=1e-4, abs=1e-5)
