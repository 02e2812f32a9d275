"""lm-eval's client for completion servers with our server: item by item the results of the model in
process.
"""

import contextlib
import sys

import pytest

pytest.importorskip("tenacity")
pytest.importorskip("starlette")

# Before lm-eval, which reads the variable for its cache of datasets at import.
from test_parity_harness import CONTEXT, TASKS, answers, expect_alike, run_folder  # isort: skip

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from serving_process import started

pytestmark = pytest.mark.filterwarnings("default")
"""Warnings of lm-eval and of what it imports are for others to mend."""


@pytest.mark.parametrize(
    ("names", "longest", "at_once"),
    [
        # One more than a context: the last token of a text is only a target.
        (["zaya_choice", "zaya_last_word"], CONTEXT + 1, 1),
        (["zaya_choice", "zaya_last_word"], CONTEXT + 1, 3),
        (["zaya_answers", "zaya_stopped"], CONTEXT, 3),
    ],
)
def test_lm_evals_http_client_matches_the_model_in_process(names, longest, at_once):
    """Except for whole texts, which the client does not start with a token: it scores all tokens but the
    first.
    """
    folder = run_folder(False)
    command = [sys.executable, "-m", "zaya_jax.cli", "serve", str(folder / "run"), "--port=0"]
    with started(command) as server, contextlib.chdir(TASKS):
        actual = simple_evaluate(
            "local-completions",
            model_args={
                "model": "run",
                "base_url": f"{server.address}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(folder / "out"),
                "max_length": longest + 1,  # it reserves one for a token that it requests and ignores
                "add_bos_token": True,
                "num_concurrent": at_once,
                "max_retries": 1,
            },
            tasks=names,
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            num_fewshot=0,
            bootstrap_iters=0,
            log_samples=True,
        )
    for name in names:
        for theirs, ours in zip(actual["samples"][name], answers(True, 0)["samples"][name], strict=True):
            for their_answer, our_answer in zip(theirs["resps"], ours["resps"], strict=True):
                expect_alike(their_answer[0], our_answer[0])
