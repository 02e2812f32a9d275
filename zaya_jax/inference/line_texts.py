"""Texts of prompt lines, which the engine continues with continuous batching.

Bits: the engine's rounding depends on the lines that it continues at a time. Lines are therefore divided into
groups that depend on all lines and on the number of slots alone, and each group gets its own engine.
A group that is continued again, as a whole, gets the same bits, whatever became of the other groups.
"""

import dataclasses
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence

from zaya_jax.data.tokenizers.tokenizer import Tokenizer
from zaya_jax.errors import UserError
from zaya_jax.inference.completion import Completion, complete, text_writer
from zaya_jax.inference.engine.decoder import cast_matrices
from zaya_jax.inference.engine.engine import PREFILL_CHUNK, PREFIX_BYTES, Engine
from zaya_jax.inference.engine.generate import cache_length, padded_length
from zaya_jax.inference.engine.request import Event, Failed, Request, RequestHandle, Tokens
from zaya_jax.inference.engine.sampling_params import SamplingParams
from zaya_jax.inference.prompt_files import PromptLine
from zaya_jax.model.zaya import Zaya

LINES_PER_SLOT = 8
"""Lines of a group by slot. The slots that become free last wait for the end of a group: a larger group has
less of that, and a process that resumes has more to compute again."""
MIN_LENGTH = 256
"""Tokens that the smallest cache has room for in each slot."""

Texts = Sequence[tuple[PromptLine, Completion]]


def continue_lines(
    model: Zaya,
    variables: Mapping,
    tokenizer: Tokenizer,
    lines: Sequence[PromptLine],
    params: SamplingParams,
    *,
    batch_size: int,
    context_devices: int = 1,
    done: Container[int] = (),
) -> Iterator[Texts]:
    """Continues lines, and yields those whose texts have become complete, a few at a time.

    Args:
      model: the model.
      variables: its weights.
      tokenizer: tokenizer of the texts.
      lines: prompts; their limits, seeds and end tokens replace those of the parameters.
      params: how the lines are continued. A constraint waits for the thoughts of chats.
      batch_size: maximum number of lines that are continued at a time.
      context_devices: number of devices that share the cache.
      done: numbers of lines that have a text. A group of such lines alone is skipped, and a line of another
        group is continued and yielded again.

    Raises:
      UserError: for a constraint that a text cannot follow, and for logits that are not finite.
    """
    # More slots than there are lines would be computed in vain.
    size = min(batch_size, len(lines))
    variables = cast_matrices(model, variables)
    if context_devices > 1:
        # The engine's rows each have a length. Devices can share a cache of rows of one length only, which
        # are continued as static batches.
        yield from continue_in_batches(
            model, variables, tokenizer, lines, params, size=size, context_devices=context_devices, done=done
        )
        return
    for length, group in groups(lines, size):
        if all(line.number in done for line in group):
            continue
        # Without a name here, so that its cache is freed before the next group's is allocated.
        yield from _continue_group(
            _engine_for(model, variables, group, size, length), tokenizer, group, params
        )


def _engine_for(
    model: Zaya, variables: Mapping, group: Sequence[PromptLine], num_slots: int, length: int
) -> Engine:
    return Engine(
        model,
        variables,
        num_slots=num_slots,
        max_length=min(length, model.config.max_position_embeddings),
        # Only prompts can share a prefix here, and a block of a text would be saved in vain.
        prefix_bytes=PREFIX_BYTES if _share_blocks(group) else 0,
        max_waiting=len(group),
    )


def groups(lines: Sequence[PromptLine], num_slots: int) -> Iterator[tuple[int, Sequence[PromptLine]]]:
    """Divides lines into groups; yields also the number of tokens that the slots of a group have room for.

    The longest lines come first, so that what does not fit into memory fails at once, and so that no long
    text begins when the others of its group end.

    Args:
      lines: prompts.
      num_slots: number of lines that are continued at a time.
    """

    def num_tokens(line: PromptLine) -> int:
        return len(line.prompt.tokens) + line.limit

    def bucket(line: PromptLine) -> int:
        # Powers of two, so that there are few programs, and short lines do not pay for long caches.
        return max(MIN_LENGTH, 1 << (num_tokens(line) - 1).bit_length())

    size = LINES_PER_SLOT * num_slots
    for _, each in itertools.groupby(sorted(lines, key=num_tokens, reverse=True), key=bucket):
        same = list(each)
        length = slot_length(num_tokens(same[0]))
        by_limit = sorted(same, key=lambda line: line.limit, reverse=True)
        yield from ((length, by_limit[first : first + size]) for first in range(0, len(by_limit), size))


def slot_length(num_tokens: int) -> int:
    """Returns the number of tokens that a slot has room for, for a text of this number of tokens."""
    # At most 256 tokens or a quarter more than needed, and few different lengths.
    step = max(MIN_LENGTH, (1 << (num_tokens - 1).bit_length()) // 8)
    return -(-num_tokens // step) * step


def _share_blocks(lines: Sequence[PromptLine]) -> bool:
    """Whether some prompts begin with the same block of the prefix cache."""
    prompts = [line.prompt.tokens for line in lines if len(line.prompt.tokens) > PREFILL_CHUNK]
    return len({tuple(prompt[:PREFILL_CHUNK]) for prompt in prompts}) < len(prompts)


def _continue_group(
    engine: Engine, tokenizer: Tokenizer, lines: Sequence[PromptLine], params: SamplingParams
) -> Iterator[Texts]:
    # The engine is stepped in this thread, so that a list suffices, and the same lines give the same rounds.
    events: list[tuple[_LineText, Event]] = []
    for line in lines:
        text = _LineText(tokenizer, line, params_of(line, params))
        request = Request(tuple(line.prompt.tokens), text.params)
        text.handle = engine.submit(request, lambda event, text=text: events.append((text, event)))
    has_work = True
    while has_work:
        has_work = engine.step()
        finished = [text for text, event in events if text.add(event)]
        events.clear()
        if finished:
            yield [(text.line, text.completion()) for text in finished]


class _LineText:
    """The text of a line while the engine continues it.

    Attributes:
      line: the line.
      params: how the line is continued.
      handle: handle of its request; None until it is submitted.
    """

    def __init__(self, tokenizer: Tokenizer, line: PromptLine, params: SamplingParams):
        self.line, self.params = line, params
        self.handle: RequestHandle | None = None
        self._writer = text_writer(tokenizer, params)
        self._text = ""
        self._tokens: list[int] = []
        self._logprobs: list[float] = []

    def add(self, event: Event) -> bool:
        """Adds the tokens of an event; returns whether the text ends with them.

        Raises:
          UserError: if the logits are not finite, or a constraint cannot be followed.
        """
        if isinstance(event, Failed):
            error = event.error
            if isinstance(error, FloatingPointError):
                raise UserError(f"prompt {self.line.number}: {error}; check the weights") from error
            raise error
        if not isinstance(event, Tokens) or self._writer.finish_reason:
            return False
        for new in event.new:
            self._text += "".join(piece.text for piece in self._writer.add(new.token))
            self._tokens.append(new.token)
            self._logprobs.append(new.logprob)
            # A stop string may end the text before the other tokens of the event.
            if self._writer.finish_reason:
                break
        if self._writer.finish_reason is None:
            return False
        # The engine does not know stop strings.
        assert self.handle is not None, "events follow the submission"
        self.handle.cancel()
        return True

    def completion(self) -> Completion:
        """Returns the text after its end."""
        assert self._writer.finish_reason is not None, "the text has ended"
        return Completion(self._text, tuple(self._tokens), tuple(self._logprobs), self._writer.finish_reason)


def params_of(line: PromptLine, params: SamplingParams) -> SamplingParams:
    """Returns how a line is continued, from the parameters of all lines."""
    return dataclasses.replace(
        params,
        max_new_tokens=line.limit,
        seed=line.seed,
        stop_token_ids=line.prompt.end_ids,
        constraint=params.constraint and params.constraint.with_thoughts(line.prompt.think_ids),
    )


def continue_in_batches(
    model: Zaya,
    variables: Mapping,
    tokenizer: Tokenizer,
    lines: Sequence[PromptLine],
    params: SamplingParams,
    *,
    size: int,
    context_devices: int,
    done: Container[int],
) -> Iterator[Texts]:
    """Continues lines in static batches, whose cache devices may share, and yields the texts of each batch.

    Args:
      model: the model.
      variables: its weights.
      tokenizer: tokenizer of the texts.
      lines: prompts; their limits, seeds and end tokens replace those of the parameters.
      params: how the lines are continued.
      size: number of rows of a batch.
      context_devices: number of devices that share the cache.
      done: numbers of lines that have a text; a batch of such lines alone is skipped.
    """
    # Batches are formed from all lines, also from those that have answers, as groups are.
    for batch in batches(lines, size):
        if all(line.number in done for line in batch):
            continue
        # A last batch is filled up with copies of its last line: another size would be another program.
        rows = [*batch, *[batch[-1]] * (size - len(batch))]
        texts = complete(
            model,
            variables,
            tokenizer,
            [line.prompt.tokens for line in rows],
            [params_of(line, params) for line in rows],
            context_devices=context_devices,
        )
        # Without those of the copies.
        yield list(zip(batch, texts, strict=False))


def batches(lines: Sequence[PromptLine], size: int) -> Iterator[Sequence[PromptLine]]:
    """Groups lines into static batches of one padded length, one cache length and the same end tokens.

    The shapes of a line do not depend on its neighbors, and neither does the program that continues it. The
    longest lines come first, so that what does not fit into memory fails at once.

    Args:
      lines: prompts, whose cache devices share.
      size: maximum number of lines of a batch.
    """

    def shape(line: PromptLine) -> tuple[int, int, tuple[int, ...]]:
        # The same functions as in `generate`, so that a batch is never padded to another shape there.
        padded = padded_length(len(line.prompt.tokens), in_chunks=True)
        return cache_length(padded, line.limit), padded, line.prompt.end_ids

    for _, group in itertools.groupby(sorted(lines, key=shape, reverse=True), key=shape):
        by_length = sorted(group, key=lambda line: len(line.prompt.tokens), reverse=True)
        yield from (by_length[first : first + size] for first in range(0, len(by_length), size))
