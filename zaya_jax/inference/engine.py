"""Continuous batching: requests come and go while others are being written.

A cache of as many rows as there are slots lies on the device. A request waits for a free row, has its prompt
read in chunks between the steps of the others, and then writes beside them. What it writes is what it would
write alone.

Letters: B rows, T tokens of a chunk, L layers, M steps.
"""

import collections
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.inference.generate import cast_matrices
from zaya_jax.inference.generation import (
    EngineStats,
    Event,
    Failed,
    Finished,
    Full,
    NewToken,
    OnEvent,
    Request,
    RunningText,
    Ticket,
    Tokens,
)
from zaya_jax.inference.prefixes import ROOT, Prefixes, name_of_block
from zaya_jax.inference.slots import (
    Choosing,
    Chosen,
    Chunk,
    RowStates,
    WrittenSteps,
    clear_row,
    init_slots,
    put_block,
    read_chunk,
    take_block,
    write_tokens,
)
from zaya_jax.model.zaya import Zaya

__all__ = [
    "Engine",
    "EngineStats",
    "EngineThread",
    "Event",
    "Failed",
    "Finished",
    "Full",
    "NewToken",
    "Request",
    "Ticket",
    "Tokens",
]

PREFILL_CHUNK = 256
"""Tokens of a prompt that are read at once, and of a block that later prompts may begin with. So long do the
others wait for their next token; a longer chunk reads the weights less often."""
PREFIX_BYTES = 2**28
MAX_WAITING = 256
MOST_STEPS = 8
"""Tokens that rows write before the host looks, while no prompt is read: so long does a new one wait."""
MOST_SECONDS_OF_A_STEP = 600.0
"""With what it compiles."""
NO_EOS = -1
_LOG = logging.getLogger(__name__)


class Engine:
    """Continues many prompts at once, each as if it were alone.

    `submit`, `stats` and tickets may be used from any thread; `step` belongs to one.
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
        prefixes: Prefixes | None = None,
    ):
        """Takes the memory of all slots.

        Args:
          model: the network.
          variables: its weights.
          num_slots: requests that are written at the same time.
          max_length: tokens of a prompt and its continuation together.
          prefill_chunk: tokens of a prompt that are read at once, between steps of the others.
          prefix_bytes: memory for what later prompts may begin with; 0 keeps nothing.
          max_waiting: requests that may wait for a slot; more are `Full`.
          prefixes: of an engine of the same network and chunk, which ends; in place of `prefix_bytes`.

        Raises:
          ValueError: for a number that cannot be.
        """
        longest = model.config.max_position_embeddings
        if not 1 <= max_length <= longest:
            raise ValueError(
                f"max_length is {max_length}; it must be from 1 to model.max_position_embeddings, {longest}"
            )
        _at_least_one(num_slots=num_slots, prefill_chunk=prefill_chunk, max_waiting=max_waiting)
        self._model, self._variables = model, cast_matrices(model, variables)
        self.num_slots, self.max_length = num_slots, max_length
        self.prefill_chunk, self._max_waiting = prefill_chunk, max_waiting
        self.prefixes = Prefixes(prefix_bytes) if prefixes is None else prefixes
        self._cache = init_slots(model.config, num_slots, max_length, model.execution.dtype)
        self._free = list(range(num_slots))
        self._texts: list[RunningText] = []
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._changed = threading.Condition()
        self._ended: Exception | None = None
        self._num_chunks = 0
        self._num_prefilled = self._num_from_prefixes = self._num_generated = 0

    def warm_up(self) -> None:
        """Compiles all programs: the first requests would wait for them.

        It comes before any request, in the thread of `step`.
        """
        config, zero = self._model.config, np.int32(0)
        nobody = RunningText(Ticket(Request(prompt=(0,), max_new_tokens=1), lambda _: None), 0)
        # They run, without a token to read and without a row that writes.
        chunk, choosing = self._chunk(nobody, (), is_last=False), self._choosing([nobody])
        self._cache, _ = read_chunk(self._model, self._variables, self._cache, chunk, choosing)
        for num_rows in self._numbers_of_rows():
            self._write_rows([None] * num_rows, 1)
        if self.prefixes.keeps_any:
            time = self.prefill_chunk
            block = take_block(config, self._cache, zero, np.int32(time), time=time)
            self._cache = put_block(config, self._cache, zero, zero, block)
        jax.block_until_ready(self._cache)

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        """Has a prompt continued; what comes of it is told from within `step`.

        Args:
          request: the prompt, and how it is continued.
          on_event: is called with each event, of which `Finished` or `Failed` is the last.

        Raises:
          ValueError: for a request that cannot be.
          Full: if too many wait.
          RuntimeError: if the engine has ended.
        """
        request.check(self._model.config, self.max_length)
        ticket = Ticket(request, on_event)
        with self._changed:
            if self._ended is not None:
                raise RuntimeError(f"the engine has ended: {self._ended}") from self._ended
            if len(self._waiting) >= self._max_waiting:
                raise Full(f"{len(self._waiting)} requests wait already, and that is as many as may")
            self._waiting.append(ticket)
            self._changed.notify_all()
        return ticket

    def stats(self) -> EngineStats:
        """What it does now, and has done."""
        with self._changed:
            return EngineStats(
                running=len(self._texts),
                waiting=len(self._waiting),
                free_slots=len(self._free),
                tokens_prefilled=self._num_prefilled,
                tokens_from_prefixes=self._num_from_prefixes,
                tokens_generated=self._num_generated,
                prefix_bytes=self.prefixes.num_bytes,
            )

    def wait_for_work(self, seconds: float) -> bool:
        """Whether there is something to do, now or when somebody asks for it within this time."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._texts or self._waiting), seconds)

    def step(self) -> bool:
        """One round on the device: a chunk of a prompt, and a token of each text or a few.

        Returns:
          Whether anything is left to do.
        """
        self._end_cancelled()
        self._admit()
        reading = [text for text in self._texts if text.is_reading]
        if reading:  # one of them, and only a chunk: no text waits for longer than that
            self._read_some(self._next_to_read(reading))
        writing = [text for text in self._texts if not text.is_reading]
        if writing:
            self._write(writing, 1 if reading else MOST_STEPS)
        with self._changed:
            return bool(self._texts or self._waiting)

    def end(self, error: Exception | None = None) -> None:
        """Ends all requests, and takes no others: as cancelled, or as failed by an error.

        It belongs to the thread of `step`, or to any one when there is none.
        """
        with self._changed:
            self._ended = error or RuntimeError("it was closed")
            left = [*(text.ticket for text in self._texts), *self._waiting]
            self._free = list(range(self.num_slots))
            self._texts.clear()
            self._waiting.clear()
        for ticket in left:
            _tell(ticket, Failed(error) if error else Finished("cancelled"))

    def _end_cancelled(self) -> None:
        with self._changed:
            gone = [ticket for ticket in self._waiting if ticket.is_cancelled]
            self._waiting = collections.deque(each for each in self._waiting if not each.is_cancelled)
        for ticket in gone:
            _tell(ticket, Finished("cancelled"))
        for text in [text for text in self._texts if text.ticket.is_cancelled]:
            text.reason = "cancelled"
            self._report(text)

    def _admit(self) -> None:
        """Gives free slots to those who have waited longest."""
        with self._changed:
            while self._free and self._waiting:
                row = min(self._free)  # few texts are in few first rows, of which alone a step costs
                self._free.remove(row)
                self._texts.append(RunningText(self._waiting.popleft(), row))

    def _next_to_read(self, reading: Sequence[RunningText]) -> RunningText:
        """By turns that which came first and that which is done soonest."""
        # By order alone a question of ten tokens would wait for a book that came before it; without order the
        # book would wait for as long as questions come.
        self._num_chunks += 1
        if self._num_chunks % 2:
            return reading[0]
        return min(reading, key=lambda text: len(text.request.prompt) - text.length)

    def _read_some(self, text: RunningText) -> None:
        """Copies what is known of a prompt, and reads the next chunk of the rest."""
        self._copy_known(text)
        tokens = text.request.prompt[text.length :][: self.prefill_chunk]
        is_last = text.length + len(tokens) == len(text.request.prompt)
        chunk, choosing = self._chunk(text, tokens, is_last=is_last), self._choosing([text])
        self._cache, chosen = read_chunk(self._model, self._variables, self._cache, chunk, choosing)
        text.length += len(tokens)
        self._count(prefilled=len(tokens))
        self._keep_block(text)
        if is_last:
            self._choose(text, jax.device_get(chosen), (0,))
            self._report(text)

    def _chunk(self, text: RunningText, tokens: Sequence[int], *, is_last: bool) -> Chunk:
        tokens_1T = np.zeros((1, self.prefill_chunk), np.int32)
        tokens_1T[0, : len(tokens)] = tokens
        return Chunk(
            tokens_1T=jnp.asarray(tokens_1T),
            row=jnp.asarray(text.row, jnp.int32),
            length=jnp.asarray(text.length, jnp.int32),
            num_new=jnp.asarray(len(tokens), jnp.int32),
            is_last=jnp.asarray(is_last),
        )

    def _copy_known(self, text: RunningText) -> None:
        """Copies blocks that a prompt begins with. Its last token is read in any case: what comes then?"""
        time = self.prefill_chunk
        while self.prefixes.keeps_any and text.length + time < len(text.request.prompt):
            name = self._name_of_next(text, text.length)
            if (block := self.prefixes.get(name)) is None:
                break
            row, length = np.int32(text.row), np.int32(text.length)
            self._cache = put_block(self._model.config, self._cache, row, length, block)
            text.names.append(name)
            text.length += time
            text.ticket.num_cached += time
            self._count(from_prefixes=time)
        self.prefixes.use(text.names)

    def _name_of_next(self, text: RunningText, first: int) -> bytes:
        parent = text.names[-1] if text.names else ROOT
        return name_of_block(parent, text.tokens[first : first + self.prefill_chunk])

    def _keep_block(self, text: RunningText) -> None:
        """Keeps a text's last block if it has just become whole; later the state behind it is gone."""
        time = self.prefill_chunk
        if not self.prefixes.keeps_any or text.length % time:
            return
        name = self._name_of_next(text, text.length - time)
        text.names.append(name)
        if self.prefixes.get(name) is None:
            row, length = np.int32(text.row), np.int32(text.length)
            block = take_block(self._model.config, self._cache, row, length, time=time)
            self.prefixes.put(text.names, block)

    def _write(self, texts: Sequence[RunningText], num_steps: int) -> None:
        """Writes a token in each of these rows, or as many as nothing comes between."""
        if self.prefixes.keeps_any:  # blocks are kept when they are whole, and not later
            num_steps = min(num_steps, *(_to_multiple(text.length, self.prefill_chunk) for text in texts))
        self._take(texts, jax.device_get(self._write_rows(self._by_row(texts), num_steps)))

    def _write_rows(self, by_row: Sequence[RunningText | None], num_steps: int) -> WrittenSteps:
        rows, choosing, steps = _row_states(by_row), self._choosing(by_row), np.int32(num_steps)
        program = self._model, self._variables, self._cache
        self._cache, did = write_tokens(*program, rows, choosing, steps, most_steps=MOST_STEPS)
        return did

    def _take(self, texts: Sequence[RunningText], did: WrittenSteps) -> None:
        """What the rows wrote, on the host."""
        was_active_MB = np.asarray(did.was_active_MB)
        for text in texts:
            for step in np.flatnonzero(was_active_MB[:, text.row]).tolist():
                routing = did.experts_LB[step, :, text.row], did.probabilities_LB[step, :, text.row]
                text.read(*(x.tolist() for x in routing))
                self._choose(text, did.chosen, (step, text.row))
            if text in self._texts:
                self._keep_block(text)
                self._report(text)

    def _choose(self, text: RunningText, chosen: Chosen, where: tuple[int, ...]) -> None:
        """Gives a text its next token, or ends it if there is none."""
        if not chosen.is_finite_B[where]:
            self._fail(text)
            return
        num_top = text.request.num_top_logprobs
        top_tokens, top_logprobs = (
            x[where][:num_top] for x in (chosen.top_tokens_BJ, chosen.top_logprobs_BJ)
        )
        top = tuple(zip(top_tokens.tolist(), top_logprobs.tolist(), strict=True))
        before = text.num_new
        text.choose(NewToken(int(chosen.token_B[where]), float(chosen.logprob_B[where]), top))
        self._count(generated=text.num_new - before)

    def _fail(self, text: RunningText) -> None:
        """Ends a text whose logits are no numbers, and leaves nothing of it behind."""
        self.prefixes.drop(text.names)
        self._cache = clear_row(self._cache, np.int32(text.row))
        error = FloatingPointError(
            f"behind {text.length} tokens of the text the network's logits are not finite numbers"
        )
        self._tell_ready(text)
        self._free_row(text)
        _tell(text.ticket, Failed(error))

    def _report(self, text: RunningText) -> None:
        """Tells what is new of a text, and frees its row if it has ended."""
        self._tell_ready(text)
        if text.reason is not None:
            self._free_row(text)
            _tell(text.ticket, Finished(text.reason))

    def _tell_ready(self, text: RunningText) -> None:
        if ready := text.take_ready():
            _tell(text.ticket, Tokens(ready))

    def _free_row(self, text: RunningText) -> None:
        with self._changed:
            self._texts.remove(text)
            self._free.append(text.row)

    def _count(self, *, prefilled: int = 0, from_prefixes: int = 0, generated: int = 0) -> None:
        with self._changed:
            self._num_prefilled += prefilled
            self._num_from_prefixes += from_prefixes
            self._num_generated += generated

    def _numbers_of_rows(self) -> list[int]:
        return [*(4**n for n in range(self.num_slots.bit_length()) if 4**n < self.num_slots), self.num_slots]

    def _by_row(self, texts: Sequence[RunningText]) -> list[RunningText | None]:
        """The texts of the first rows, of which so many take part that there are few programs."""
        needed = 1 + max(text.row for text in texts)
        num_rows = next(number for number in self._numbers_of_rows() if number >= needed)
        by_row: list[RunningText | None] = [None] * num_rows
        for text in texts:
            by_row[text.row] = text
        return by_row

    def _choosing(self, texts: Sequence[RunningText | None]) -> Choosing:
        """How rows choose; those without a text as it costs least."""
        nobody = Request(prompt=(0,), max_new_tokens=1)
        requests = [nobody if text is None else text.request for text in texts]
        numbers = [0 if text is None else text.num_new for text in texts]

        def column(values: Any, dtype: Any) -> jax.Array:
            return jnp.asarray(np.array(values, dtype))

        return Choosing(
            seed_B=column([each.seed for each in requests], np.uint32),
            number_B=column(numbers, np.int32),
            temperature_B=column([each.temperature for each in requests], np.float32),
            top_k_B=column([each.top_k or self._model.config.vocab_size for each in requests], np.int32),
            top_p_B=column([each.top_p or 1 for each in requests], np.float32),
            wants_top=column(any(each.num_top_logprobs for each in requests), np.bool_),
        )


class EngineThread:
    """A thread that has an engine step while there is work, and sleeps else; used with `with`.

    Attributes:
      error: what ended the engine, if anything did: all requests have failed with it, and all later ones are
        refused.
    """

    def __init__(self, engine: Engine):
        """Makes the thread; `with` starts it."""
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> "EngineThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread behind its step, and all requests as cancelled."""
        self._stop.set()
        self._thread.join(MOST_SECONDS_OF_A_STEP)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread is in a step since {MOST_SECONDS_OF_A_STEP} s")
        if self.error is None:
            self._engine.end()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still goes on."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if self._engine.wait_for_work(0.1):
                    self._engine.step()
        except Exception as error:  # of the device: its memory is lost, and with it all texts
            _LOG.exception("the engine has ended")
            self.error = error
            self._engine.end(error)


def _tell(ticket: Ticket, event: Event) -> None:
    """Hands out an event. Whoever cannot take it wants no more; the others go on."""
    try:
        ticket.on_event(event)
    except Exception:
        _LOG.exception("whoever asked for a text failed to take it, and the text ends")
        ticket.cancel()


def _row_states(texts: Sequence[RunningText | None]) -> RowStates:
    """Where rows are; those without a text have no steps left."""
    newest_B, length_B, left_B = np.zeros((3, len(texts)), np.int32)
    eos_B = np.full(len(texts), NO_EOS, np.int32)
    for row, text in enumerate(texts):
        if text is not None:
            newest_B[row], length_B[row], left_B[row] = text.tokens[-1], text.length, text.steps_left
            eos_B[row] = NO_EOS if text.request.eos_id is None else text.request.eos_id
    return RowStates(*map(jnp.asarray, (newest_B, length_B, left_B, eos_B)))


def _to_multiple(length: int, of: int) -> int:
    """How far it is to the next multiple behind a length."""
    return of - length % of


def _at_least_one(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}; it must be at least 1")
