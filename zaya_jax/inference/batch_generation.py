"""`zaya generate --input`: continues the prompts of a file in batches, and resumes after an interruption."""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.files import durable
from zaya_jax.inference.answer_files import AnswerFile
from zaya_jax.inference.completion import Completion, complete
from zaya_jax.inference.engine.generate import cache_length, padded_length
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.loading import LoadedRun, show_progress
from zaya_jax.inference.prompt_files import PromptLine, read_prompt_lines
from zaya_jax.inference.prompting import load_prompting
from zaya_jax.inference.sampling_options import sampling_params
from zaya_jax.inference.structured.grammar import Grammar
from zaya_jax.inference.structured.schema_option import compile_option
from zaya_jax.model.zaya import Zaya

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
    for batch in answer_batches(
        run.model,
        run.variables,
        run.tokenizer,
        lines,
        params,
        batch_size=options.batch_size,
        context_devices=options.context_devices,
        done=answers.done,
    ):
        answers.add(
            {
                line.number: _answer(line, completion, logprobs=options.logprobs)
                for line, completion in batch
                # The answers of the other lines are in the file already.
                if line.number not in answers.done
            }
        )
        if time.monotonic() - last_report > PROGRESS_SECONDS:
            last_report = time.monotonic()
            print(f"{len(answers.done)} of {len(lines)} answers", file=sys.stderr, flush=True)


def answer_batches(
    model: Zaya,
    variables: Mapping,
    tokenizer: Tokenizer,
    lines: Sequence[PromptLine],
    params: SamplingParams,
    *,
    batch_size: int,
    context_devices: int = 1,
    done: Container[int] = (),
) -> Iterator[Sequence[tuple[PromptLine, Completion]]]:
    """Continues lines, and yields each of their `batches` with its texts.

    Args:
      model: the model.
      variables: its weights.
      tokenizer: tokenizer of the texts.
      lines: prompts; their limits, seeds and end tokens replace those of the parameters.
      params: how the lines are continued. A constraint waits for the thoughts of chats.
      batch_size: maximum number of rows of a batch.
      context_devices: number of devices that share the cache.
      done: numbers of lines that have a text. A batch of such lines alone is skipped.
    """
    # A batch is filled up to its size with copies: a larger size than there are lines is computed in vain.
    size = min(batch_size, len(lines))
    # Batches are formed from all lines, also from those that have answers: a resumed process computes the
    # same batches as an uninterrupted one, and thus the same bits.
    for batch in batches(lines, size, in_chunks=context_devices > 1):
        if all(line.number in done for line in batch):
            continue
        # A last batch is filled up with copies of its last line: another size would be another program.
        rows = [*batch, *[batch[-1]] * (size - len(batch))]
        each_params = [
            dataclasses.replace(
                params,
                max_new_tokens=line.limit,
                seed=line.seed,
                stop_token_ids=line.prompt.end_ids,
                constraint=params.constraint and params.constraint.with_thoughts(line.prompt.think_ids),
            )
            for line in rows
        ]
        prompts = [line.prompt.tokens for line in rows]
        texts = complete(model, variables, tokenizer, prompts, each_params, context_devices=context_devices)
        # Without those of the copies.
        yield list(zip(batch, texts, strict=False))


def batches(
    lines: Sequence[PromptLine], size: int, *, in_chunks: bool = False
) -> Iterator[Sequence[PromptLine]]:
    """Groups lines into batches of one padded length, one cache length and the same end tokens.

    The shapes of a line do not depend on its neighbors, and neither does the program that continues it. The
    longest lines come first, so that what does not fit into memory fails at once.

    Args:
      lines: prompts.
      size: maximum number of lines of a batch.
      in_chunks: whether devices share the cache.
    """

    def shape(line: PromptLine) -> tuple[int, int, tuple[int, ...]]:
        # The same functions as in `generate`, so that a batch is never padded to another shape there.
        padded = padded_length(len(line.prompt.tokens), in_chunks=in_chunks)
        return cache_length(padded, line.limit), padded, line.prompt.end_ids

    for _, group in itertools.groupby(sorted(lines, key=shape, reverse=True), key=shape):
        by_length = sorted(group, key=lambda line: len(line.prompt.tokens), reverse=True)
        yield from (by_length[first : first + size] for first in range(0, len(by_length), size))


def _answer(line: PromptLine, completion: Completion, *, logprobs: bool) -> dict[str, Any]:
    answer: dict[str, Any] = {
        **line.fields,
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "num_prompt_tokens": len(line.prompt.tokens),
        "num_new_tokens": len(completion.tokens),
    }
    return answer | ({"tokens": completion.tokens, "logprobs": completion.logprobs} if logprobs else {})
