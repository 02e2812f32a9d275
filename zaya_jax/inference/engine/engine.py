"""Continuous batching: requests start and finish while others are generated.

The cache has one row per slot. A request waits for a free row, has its prompt prefilled in chunks between the
decode steps of the others, and is then decoded together with them. Short prompts share a chunk. Its draws are
those of `generate` for this prompt alone with the same parameters. Its logits differ by rounding, also with
the number of rows that are read or decoded at a time: in bfloat16 a text may change with the load
(see `zaya_jax.inference.engine.generate`).

Letters: T tokens of a chunk, M decode steps.
"""

import collections
import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np

from zaya_jax.errors import UserError
from zaya_jax.inference.engine.cache_rows import clear_row, copy_block, make_cache, paste_block
from zaya_jax.inference.engine.decoder import (
    DecodedSteps,
    SampledTokens,
    cast_matrices,
    decode_steps,
    prefill_chunk,
)
from zaya_jax.inference.engine.masked_sampling import MaskedTokens, sample_constrained, warm_up
from zaya_jax.inference.engine.prefix_cache import PrefixCache
from zaya_jax.inference.engine.request import (
    EngineStats,
    Event,
    Failed,
    Finished,
    OnEvent,
    QueueFull,
    Request,
    RequestHandle,
    Tokens,
)
from zaya_jax.inference.engine.sampling import RowSampling
from zaya_jax.inference.engine.sampling_params import check_prompt
from zaya_jax.inference.engine.scheduling import (
    ChunkShape,
    PrefillTurns,
    RunningSequence,
    batch_sizes,
    by_row,
)
from zaya_jax.inference.engine.sequence import (
    active_steps,
    decode_rows,
    prompt_chunk,
    sampling_of,
    token_at,
)
from zaya_jax.model.zaya import Zaya

PREFILL_CHUNK = 256
"""Tokens of a prompt per prefill, and of a block of the prefix cache. Running texts wait that long for their
next token; a longer chunk reads the weights less often."""
PREFIX_BYTES = 2**28
MAX_WAITING = 256
MAX_DECODE_STEPS = 8
"""Decode steps between two returns to Python while no prompt is prefilled; a new request waits that long."""
_LOG = logging.getLogger(__name__)


class Engine:
    """Continues many prompts at once.

    Any thread may call `submit` and `stats` and use handles; one thread calls `step`.

    Attributes:
      variables: weights, matrices in the compute dtype.
      num_slots: maximum number of running requests.
      max_length: maximum number of tokens of a prompt and its continuation together.
      prefill_chunk: tokens of a prompt per prefill.
      prefixes: blocks of tokens that later prompts may begin with.
    """

    def __init__(
        self,
        model: Zaya,
        variables: Mapping,
        *,
        num_slots: int,
        max_length: int,
        prefill_chunk: int = PREFILL_CHUNK,
        prefix_bytes: int = PREFIX_BYTES,
        max_waiting: int = MAX_WAITING,
        prefixes: PrefixCache | None = None,
    ):
        """Allocates the cache of all slots.

        Args:
          model: the model.
          variables: its weights.
          num_slots: maximum number of running requests.
          max_length: maximum number of tokens of a prompt and its continuation together.
          prefill_chunk: tokens of a prompt per prefill, between decode steps of the others.
          prefix_bytes: size of the prefix cache in bytes; 0 disables it.
          max_waiting: maximum number of waiting requests; `submit` raises `QueueFull` beyond it.
          prefixes: prefix cache of an earlier engine of the same model and chunk; it replaces `prefix_bytes`.

        Raises:
          UserError: for a number out of range.
        """
        longest = model.config.max_position_embeddings
        if not 1 <= max_length <= longest:
            raise UserError(
                f"max_length is {max_length}; it must be from 1 to model.max_position_embeddings, {longest}"
            )
        _check_at_least_one(num_slots=num_slots, prefill_chunk=prefill_chunk, max_waiting=max_waiting)
        # Cast once, because a cast within the programs would read the float32 weights at every step.
        self._model, self.variables = model, cast_matrices(model, variables)
        self.num_slots, self.max_length = num_slots, max_length
        self.prefill_chunk, self._max_waiting = prefill_chunk, max_waiting
        self.prefixes = PrefixCache(prefix_bytes) if prefixes is None else prefixes
        self._cache = make_cache(model, self.variables, num_slots, max_length, padding="right")
        self._free = list(range(num_slots))
        self._running: list[RunningSequence] = []
        self._waiting: collections.deque[RequestHandle] = collections.deque()
        # Guards the waiting requests, which `submit` changes in other threads.
        self._changed = threading.Condition()
        self._ended: Exception | None = None
        self._turns = PrefillTurns(num_slots, prefill_chunk)
        self._num_prefilled = self._num_from_prefixes = self._num_generated = 0

    def warm_up(self, *, with_masks: bool = False) -> None:
        """Compiles all programs, so that no request waits for a compilation.

        Call it, or each of `programs`, before any request, in the thread that calls `step`.

        Args:
          with_masks: whether requests may have a constraint.
        """
        for run in self.programs(with_masks=with_masks).values():
            run()

    def programs(self, *, with_masks: bool = False) -> dict[str, Callable[[], object]]:
        """Returns every compiled program by name, as a call that reads no token and changes no row.

        Args:
          with_masks: whether requests may have a constraint.
        """
        chunk, short = self._turns.of_one, self._turns.of_several
        programs: dict[str, Callable[[], object]] = {
            "prefill of a chunk": functools.partial(self._prefill, [], chunk, is_last=False)
        }
        if short is not None:
            short_chunk = functools.partial(self._prefill, [], short, is_last=False)
            programs[f"prefill of {short.num_rows} short prompts"] = short_chunk
        for num_rows in batch_sizes(self.num_slots):
            rows = f"{num_rows} row{'s' * (num_rows > 1)}"
            programs[f"decoding of {rows}"] = functools.partial(self._decode_rows, [None] * num_rows, 1)
            if with_masks:
                mask = functools.partial(self._mask_nothing, num_rows)
                programs[f"sampling of {rows} with masks"] = mask
        if self.prefixes.is_enabled:
            programs["copies of shared prefixes"] = self._copy_nothing
        return programs | {"clearing of a row": self._clear_row}

    def _mask_nothing(self, num_rows: int) -> None:
        _, logits_BV, sampling = self._decode_rows([None] * num_rows, 0)
        warm_up(logits_BV, sampling)

    def _copy_nothing(self) -> None:
        config, zero, time = self._model.config, np.int32(0), self.prefill_chunk
        block = copy_block(config, self._cache, zero, np.int32(time), time=time)
        self._cache = paste_block(config, self._cache, zero, zero, block)

    def _clear_row(self, row: int = 0) -> None:
        self._cache = clear_row(self._cache, np.int32(row))

    def submit(self, request: Request, on_event: OnEvent) -> RequestHandle:
        """Queues a request.

        Args:
          request: the prompt, and how it is continued.
          on_event: function that receives each event, from within `step`; the last one is `Finished` or
            `Failed`.

        Raises:
          UserError: for an invalid request.
          QueueFull: if the queue is full.
          RuntimeError: if the engine has ended.
        """
        check_prompt(request.prompt, request.params, self._model.config, max_length=self.max_length)
        handle = RequestHandle(request, on_event)
        with self._changed:
            if self._ended is not None:
                raise RuntimeError(f"the engine has ended: {self._ended}") from self._ended
            if len(self._waiting) >= self._max_waiting:
                raise QueueFull(f"the queue is full: {len(self._waiting)} requests are waiting")
            # Append under the lock of `_ended`: otherwise a request could be queued after the engine ended,
            # and wait forever.
            self._waiting.append(handle)
            self._changed.notify_all()
        return handle

    def stats(self) -> EngineStats:
        """Returns the current load and the counters."""
        with self._changed:
            # Under the lock, so that all numbers belong to one moment.
            return EngineStats(
                running=len(self._running),
                waiting=len(self._waiting),
                free_slots=len(self._free),
                tokens_prefilled=self._num_prefilled,
                tokens_from_prefixes=self._num_from_prefixes,
                tokens_generated=self._num_generated,
                prefix_bytes=self.prefixes.num_bytes,
            )

    def wait_for_work(self, seconds: float) -> bool:
        """Waits until there is a request; returns whether one came within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._running or self._waiting), seconds)

    def step(self) -> bool:
        """Runs one round on the device: a chunk of prompts, and one or a few tokens of each running text.

        Returns:
          Whether any request is left.
        """
        self._drop_cancelled()
        self._admit()
        prefilling = [each for each in self._running if each.is_prefilling]
        if prefilling:  # one chunk: no running text waits longer than that
            self._prefill_next(prefilling)
        decoding = [each for each in self._running if not each.is_prefilling]
        if decoding:
            # While a prompt is being read only one token, because more of them would delay the next chunk.
            self._decode(decoding, 1 if prefilling else MAX_DECODE_STEPS)
        with self._changed:
            return bool(self._running or self._waiting)

    def end(self, error: Exception | None = None) -> None:
        """Ends all requests, as failed with an error or else as cancelled, and rejects later ones.

        Call it in the thread that calls `step`, or in any thread when none does.
        """
        with self._changed:
            self._ended = error or RuntimeError("it was closed")
            # Collect the handles under the lock and send events without it: a receiver may call `submit` or
            # `stats`.
            handles = [*(each.handle for each in self._running), *self._waiting]
            self._free = list(range(self.num_slots))
            self._running.clear()
            self._waiting.clear()
        for handle in handles:
            _send(handle, Failed(error) if error else Finished("cancelled"))

    def _drop_cancelled(self) -> None:
        with self._changed:
            cancelled = [handle for handle in self._waiting if handle.is_cancelled]
            self._waiting = collections.deque(each for each in self._waiting if not each.is_cancelled)
        for handle in cancelled:
            _send(handle, Finished("cancelled"))
        # A new list, because `_report` removes sequences from the running ones.
        for sequence in [each for each in self._running if each.handle.is_cancelled]:
            # `_report` sends the tokens that are complete before it frees the row.
            sequence.reason = "cancelled"
            self._report(sequence)

    def _admit(self) -> None:
        """Assigns free rows to the requests that have waited longest."""
        with self._changed:
            while self._free and self._waiting:
                # The first free row: a decode step costs as many rows as reach up to the last one in use.
                row = min(self._free)
                self._free.remove(row)
                self._running.append(RunningSequence(self._waiting.popleft(), row))

    def _prefill_next(self, prefilling: Sequence[RunningSequence]) -> None:
        """Copies what the prefix cache has of the prompts, and reads the next chunk of the rests."""
        for each in prefilling:  # of all prompts, because it may make their rests short
            self._copy_prefix(each)
        group, shape = self._turns.select(prefilling)
        # Several prompts share a chunk only if all of them end with it.
        is_last = group[0].num_unread <= shape.time
        sampled, logits_BV, sampling = self._prefill(group, shape, is_last=is_last)
        for each in group:
            num_new = min(each.num_unread, shape.time)
            each.num_computed += num_new
            self._count(prefilled=num_new)
            self._save_block(each)
        if is_last:
            # Only the last chunk: for the others the host need not wait for the device.
            masked = sample_constrained(group, logits_BV, sampling)
            sampled = jax.device_get(sampled)
            for index, each in enumerate(group):
                self._append(each, sampled, (index,), masked)
                # Appending fails a sequence whose logits are not finite, and removes it.
                if each in self._running:
                    self._report(each)

    def _prefill(
        self, group: Sequence[RunningSequence], shape: ChunkShape, *, is_last: bool
    ) -> tuple[SampledTokens, jax.Array, RowSampling]:
        """Reads the next tokens of the prompts of a group into their rows."""
        rows = [*group, *[None] * (shape.num_rows - len(group))]
        # A chunk's row without a prompt has no tokens. Among several rows it belongs to no row of the cache;
        # alone, in the warm-up, it resets the state of a free row.
        chunk = prompt_chunk(
            [_next_tokens(each, shape.time) if each else () for each in rows],
            shape.time,
            [each.row if each else self.num_slots for each in rows],
            [each.num_computed if each else 0 for each in rows],
            is_last=is_last,
        )
        sampling = sampling_of(rows, self._model.config.vocab_size)
        program = self._model, self.variables, self._cache
        self._cache, sampled, logits_BV = prefill_chunk(*program, chunk, sampling, with_details=True)
        return sampled, logits_BV, sampling

    def _copy_prefix(self, sequence: RunningSequence) -> None:
        """Copies cached blocks of the prompt, but not its last token, whose logits are needed."""
        time = self.prefill_chunk
        while self.prefixes.is_enabled and sequence.num_computed + time < sequence.num_prompt:
            name = sequence.next_block_name(time)
            if (block := self.prefixes.get(name)) is None:
                break
            row, length = np.int32(sequence.row), np.int32(sequence.num_computed)
            self._cache = paste_block(self._model.config, self._cache, row, length, block)
            sequence.add_block_name(name)
            sequence.num_computed += time
            sequence.handle.num_cached += time
            self._count(from_prefixes=time)
        # Also after a miss: the blocks that were found are in use and must not be evicted next.
        self.prefixes.touch(sequence.block_names)

    def _save_block(self, sequence: RunningSequence) -> None:
        """Saves the block that has just become complete."""
        # The state after a block exists only now: the next token replaces it.
        time = self.prefill_chunk
        if not self.prefixes.is_enabled or sequence.num_computed % time:
            return
        name = sequence.next_block_name(time)
        sequence.add_block_name(name)
        if self.prefixes.get(name) is None:
            row, length = np.int32(sequence.row), np.int32(sequence.num_computed)
            block = copy_block(self._model.config, self._cache, row, length, time=time)
            self.prefixes.put(sequence.block_names, block)

    def _decode(self, decoding: Sequence[RunningSequence], num_steps: int) -> None:
        """Generates a few tokens of each sequence."""
        if self.prefixes.is_enabled:  # stop where a block becomes complete, to save it
            chunk = self.prefill_chunk
            # All rows stop together, because one call decodes all of them.
            num_steps = min(num_steps, *(chunk - each.num_computed % chunk for each in decoding))
        # The mask of a token depends on the token before it.
        if any(each.constraint is not None for each in decoding):
            num_steps = 1
        rows = by_row(decoding, self.num_slots)
        steps, logits_BV, sampling = self._decode_rows(rows, num_steps)
        masked = sample_constrained(rows, logits_BV, sampling)
        # One transfer for all rows and all steps.
        steps = jax.device_get(steps)
        for sequence in decoding:
            self._append_steps(sequence, steps, masked)
            if sequence in self._running:
                self._save_block(sequence)
                self._report(sequence)

    def _decode_rows(
        self, rows: Sequence[RunningSequence | None], num_steps: int
    ) -> tuple[DecodedSteps, jax.Array, RowSampling]:
        sampling = sampling_of(rows, self._model.config.vocab_size)
        self._cache, steps, logits_BV = decode_steps(
            self._model,
            self.variables,
            self._cache,
            decode_rows(rows),
            sampling,
            np.int32(num_steps),
            max_steps=MAX_DECODE_STEPS,
            with_details=True,
        )
        return steps, logits_BV, sampling

    def _append_steps(self, sequence: RunningSequence, steps: DecodedSteps, masked: MaskedTokens) -> None:
        assert steps.experts_LB is not None, "the engine decodes with details"
        assert steps.probabilities_LB is not None, "the engine decodes with details"
        for step in active_steps(steps, sequence.row):
            # An earlier step had logits that are not finite, and the sequence has failed.
            if sequence not in self._running:
                return
            sequence.num_computed += 1
            sequence.set_routing(
                steps.experts_LB[step, :, sequence.row].tolist(),
                steps.probabilities_LB[step, :, sequence.row].tolist(),
            )
            self._append(sequence, steps.sampled, (step, sequence.row), masked)

    def _append(
        self,
        sequence: RunningSequence,
        sampled: SampledTokens,
        index: tuple[int, ...],
        masked: MaskedTokens,
    ) -> None:
        """Appends the next token to a sequence, or fails it if there is none."""
        # Sampling from NaN returns an arbitrary token; a server must not send it as text.
        if not sampled.is_finite_B[index]:
            self._fail_not_finite(sequence)
            return
        # The last index is the row among those that were sampled.
        if (error := masked.errors.get(index[-1])) is not None:
            self._fail(sequence, error)
            return
        num_before = sequence.num_new
        new = token_at(sampled, index, sequence.params.num_top_logprobs)
        sequence.append(masked.replace(new, index[-1]))
        self._count(generated=sequence.num_new - num_before)

    def _fail_not_finite(self, sequence: RunningSequence) -> None:
        """Fails a sequence whose logits are not finite, and removes everything that was computed for it."""
        # A block that contains NaN would fail every later request that begins with the same tokens.
        self.prefixes.drop(sequence.block_names)
        self._clear_row(sequence.row)
        error = FloatingPointError(
            f"after {sequence.num_computed} tokens of the text the model's logits are not finite numbers"
        )
        self._fail(sequence, error)

    def _fail(self, sequence: RunningSequence, error: Exception) -> None:
        # The tokens before the failure are valid, and are sent before the error.
        self._send_ready(sequence)
        self._free_row(sequence)
        _send(sequence.handle, Failed(error))

    def _report(self, sequence: RunningSequence) -> None:
        """Sends the new tokens of a sequence, and frees its row if it has ended."""
        self._send_ready(sequence)
        if sequence.reason is not None:
            self._free_row(sequence)
            _send(sequence.handle, Finished(sequence.reason))

    def _send_ready(self, sequence: RunningSequence) -> None:
        if ready := sequence.pop_ready():
            _send(sequence.handle, Tokens(ready))

    def _free_row(self, sequence: RunningSequence) -> None:
        with self._changed:
            self._running.remove(sequence)
            self._free.append(sequence.row)

    def _count(self, *, prefilled: int = 0, from_prefixes: int = 0, generated: int = 0) -> None:
        with self._changed:
            # Under the lock, because other threads read the counters.
            self._num_prefilled += prefilled
            self._num_from_prefixes += from_prefixes
            self._num_generated += generated


def _next_tokens(sequence: RunningSequence, time: int) -> list[int]:
    """Returns the next tokens of a prompt, at most `time`."""
    return sequence.tokens[sequence.num_computed : min(sequence.num_computed + time, sequence.num_prompt)]


def _send(handle: RequestHandle, event: Event) -> None:
    """Sends an event. A receiver that fails cancels its own request; the others continue."""
    try:
        handle.on_event(event)
    except Exception:
        _LOG.exception("the receiver of a text failed; its request is cancelled")
        handle.cancel()


def _check_at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UserError(f"{name} is {number}; it must be at least 1")
