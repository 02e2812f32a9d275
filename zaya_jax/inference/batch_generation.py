"""`zaya generate --input`: prompts of a file in batches, whose answers outlive a kill."""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax import durable
from zaya_jax.inference.answer_lines import AnswerLines
from zaya_jax.inference.completion import Completion, complete
from zaya_jax.inference.generate import cache_length, padded_length
from zaya_jax.inference.loading import LoadedRun, load_for_writing
from zaya_jax.inference.prompt_lines import PromptLine, read_prompt_lines
from zaya_jax.inference.prompting import Prompting
from zaya_jax.inference.sampling_options import settings_of
from zaya_jax.inference.text import StopFilter

TELL_EVERY_S = 10.0


def generate_file(options: argparse.Namespace) -> None:
    """Continues all prompts of `options.input` into `options.output`.

    Raises:
      ValueError: for a line that cannot be continued, or answers of another command.
    """
    # Before anything is read: a temperature that cannot be, and a stop string without a character.
    settings_of(options, max_new_tokens=1, eos_id=None)
    StopFilter(options.stop)
    run = load_for_writing(options.run_folder)
    prompting = Prompting(run, chat=options.chat, template=options.template, letters=options.letters)
    lines = read_prompt_lines(
        options.input,
        prompting,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        allowed=run.model.config.max_position_embeddings,
    )
    answers = AnswerLines(options.output, _fingerprint(lines, run, options))
    if answers.num_found:
        print(
            f"{options.output}: {answers.num_found} of {len(lines)} answers are there already; "
            f"{len(lines) - answers.num_found} are left",
            file=sys.stderr,
        )
    _answer_all(run, lines, answers, options)
    answers.finish([line.number for line in lines])
    num_new = sum(answer["num_new_tokens"] for answer in answers.done.values())
    print(f"{options.output}: {len(lines)} answers, {num_new:,} new tokens")


def _fingerprint(lines: Sequence[PromptLine], run: LoadedRun, options: argparse.Namespace) -> str:
    """Of all that an answer depends on. How many there are at a time is not among it."""
    asked = [(line.number, line.fields, list(line.prompt.tokens), line.limit, line.seed) for line in lines]
    chosen = options.temperature, options.top_k, options.top_p, options.stop, options.logprobs
    weights = str(pathlib.Path(run.folder).resolve()), run.step
    return durable.sha256(json.dumps([asked, chosen, weights]).encode())


def _answer_all(
    run: LoadedRun, lines: Sequence[PromptLine], answers: AnswerLines, options: argparse.Namespace
) -> None:
    size = min(options.batch_size, len(lines))
    left = [line for line in lines if line.number not in answers.done]
    last_told = time.monotonic()
    for batch in batches(left, size, in_chunks=options.context_devices > 1):
        answers.add(_answer(run, batch, size, options))
        if time.monotonic() - last_told > TELL_EVERY_S:
            last_told = time.monotonic()
            print(f"{len(answers.done)} of {len(lines)} answers", file=sys.stderr, flush=True)


def batches(
    lines: Sequence[PromptLine], size: int, *, in_chunks: bool = False
) -> Iterator[Sequence[PromptLine]]:
    """Lines that are continued together: of one padded length, one length of cache and one end token.

    A line's shapes are thus its own, whatever stands beside it, and so is the program that continues it.
    The longest come first: what does not fit the memory is told at once.
    """

    def shape(line: PromptLine) -> tuple[int, int, int]:
        padded = padded_length(len(line.prompt.tokens), in_chunks=in_chunks)
        return cache_length(padded, line.limit), padded, line.prompt.end_id

    for _, alike in itertools.groupby(sorted(lines, key=shape, reverse=True), key=shape):
        by_length = sorted(alike, key=lambda line: len(line.prompt.tokens), reverse=True)
        yield from (by_length[first : first + size] for first in range(0, len(by_length), size))


def _answer(
    run: LoadedRun, batch: Sequence[PromptLine], size: int, options: argparse.Namespace
) -> dict[int, Mapping[str, Any]]:
    """Answers by the numbers of their lines."""
    # Filled up with its last line: a batch of another size would be another program.
    rows = [*batch, *[batch[-1]] * (size - len(batch))]
    settings = dataclasses.replace(
        settings_of(options, max_new_tokens=1, eos_id=batch[0].prompt.end_id),
        max_new_tokens=tuple(line.limit for line in rows),
        seed=tuple(line.seed for line in rows),
    )
    model = run.model, run.variables, run.tokenizer
    found = complete(*model, [line.prompt.tokens for line in rows], settings, stop=options.stop)
    return {
        line.number: _as_answer(line, each, logprobs=options.logprobs)
        for line, each in zip(batch, found, strict=False)
    }


def _as_answer(line: PromptLine, found: Completion, *, logprobs: bool) -> dict[str, Any]:
    answer = {
        **line.fields,
        "text": found.text,
        "finish_reason": found.finish_reason,
        "num_prompt_tokens": len(line.prompt.tokens),
        "num_new_tokens": len(found.tokens),
    }
    return answer | ({"tokens": found.tokens, "logprobs": found.logprobs} if logprobs else {})
