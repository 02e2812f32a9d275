"""`zaya generate --input`: continues the prompts of a file, and resumes after an interruption."""

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

from zaya_jax.files import durable
from zaya_jax.inference.answer_files import AnswerFile
from zaya_jax.inference.completion import Completion
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.line_texts import continue_lines
from zaya_jax.inference.loading import LoadedRun, show_progress
from zaya_jax.inference.prompt_files import PromptLine, read_prompt_lines
from zaya_jax.inference.prompting import load_prompting
from zaya_jax.inference.sampling_options import sampling_params
from zaya_jax.inference.structured.grammar import Grammar
from zaya_jax.inference.structured.schema_option import compile_option

PROGRESS_SECONDS = 10.0
"""Time between two progress lines."""


def generate_file(options: argparse.Namespace, grammar: Grammar | None = None) -> None:
    """Continues all prompts of `options.input` and writes the answers to `options.output`.

    Args:
      options: options of `zaya generate`.
      grammar: grammar of all answers; None for any text.

    Raises:
      UserError: for an invalid line, or unfinished answers of another command.
    """
    # Before the weights are read: an invalid temperature, and an empty stop string.
    params = sampling_params(options, max_new_tokens=1)
    prompting = load_prompting(options)
    run = prompting.run
    lines = read_prompt_lines(
        options.input,
        prompting,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        max_length=run.model.config.max_position_embeddings,
    )
    # After all lines were checked: an invalid line must not leave a file.
    answers = AnswerFile(options.output, _fingerprint(lines, run, options, grammar))
    if answers.num_resumed:
        print(
            f"{options.output}: {answers.num_resumed} of {len(lines)} answers exist already; "
            f"{len(lines) - answers.num_resumed} are left",
            file=sys.stderr,
        )
    show_progress(f"continuing {len(lines)} prompts; each new shape of a batch is compiled first")
    params = dataclasses.replace(params, constraint=compile_option(run, grammar, options))
    _answer_all(run, lines, answers, params, options)
    answers.finish([line.number for line in lines])
    num_new = sum(answer["num_new_tokens"] for answer in answers.done.values())
    print(f"{options.output}: {len(lines)} answers, {num_new:,} new tokens")


def _fingerprint(
    lines: Sequence[PromptLine], run: LoadedRun, options: argparse.Namespace, grammar: Grammar | None
) -> str:
    """Hashes everything that an answer depends on.

    The batch size is included: products with another number of rows are summed in another order, and a text
    may differ from the first token at which that rounding decides.
    """
    prompts = [(line.number, line.fields, list(line.prompt.tokens), line.limit, line.seed) for line in lines]
    sampling = options.temperature, options.top_k, options.top_p, options.stop, options.logprobs
    # Resolved, because the same command may be repeated from another folder. The average of a step counts as
    # other weights than the step's own.
    weights = str(pathlib.Path(run.folder).resolve()), run.step, run.weights
    shapes = min(options.batch_size, len(lines)), options.context_devices
    # Appended, so that answers without a grammar that an earlier version began can be finished.
    grammars = [] if grammar is None else [grammar.source]
    return durable.sha256(json.dumps([prompts, sampling, weights, shapes, *grammars]).encode())


def _answer_all(
    run: LoadedRun,
    lines: Sequence[PromptLine],
    answers: AnswerFile,
    params: SamplingParams,
    options: argparse.Namespace,
) -> None:
    last_report = time.monotonic()
    for texts in continue_lines(
        run.model,
        run.variables,
        run.tokenizer,
        lines,
        params,
        batch_size=options.batch_size,
        context_devices=options.context_devices,
        done=answers.done,
    ):
        # The answers of the other lines are in the file already.
        new = {
            line.number: _answer(line, completion, logprobs=options.logprobs)
            for line, completion in texts
            if line.number not in answers.done
        }
        if new:
            answers.add(new)
        if time.monotonic() - last_report > PROGRESS_SECONDS:
            last_report = time.monotonic()
            print(f"{len(answers.done)} of {len(lines)} answers", file=sys.stderr, flush=True)


def _answer(line: PromptLine, completion: Completion, *, logprobs: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {
        **line.fields,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(line.prompt.tokens),
        "num_new_tokens": len(completion.tokens),
    }
    return answer | ({"tokens": completion.tokens, "logprobs": completion.logprobs} if logprobs else {})
