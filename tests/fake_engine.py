"""An engine without a network: what it writes is known, so that any answer can be held against it."""

import collections
import contextlib
import dataclasses
import hashlib
import threading
import time

from zaya_jax.data.chat_format import load_chat_format
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.inference.engine import EngineStats, Failed, Finished, Full, NewToken, Tokens
from zaya_jax.inference.prompt_scores import PromptScores
from zaya_jax.serving.served import ServedRun

TOKENIZER = load_tokenizer("byte-chat")
FORMAT = load_chat_format("zaya", TOKENIZER)
END, THINK, THINK_END = (TOKENIZER.specials[name] for name in ("<|im_end|>", "<think>", "</think>"))
NUM_LAYERS, NUM_EXPERTS = 3, 4


def tokens_of(request):
    """What the engine writes: a word of this prompt and seed alone, again and again, up to an end token."""
    digest = hashlib.sha256(repr((request.prompt, request.seed)).encode()).hexdigest()
    thought = (
        [THINK, *TOKENIZER.encode("hm"), THINK_END]
        if request.prompt[-1] == TOKENIZER.encode("?\n")[-1]
        else []
    )
    whole = [*thought, *TOKENIZER.encode(f"é{digest[:12]} " * (1 + int(digest[:2], 16) % 40)), request.eos_id]
    return whole[: request.max_new_tokens]


def new_token(request, number, token):
    """A token with what is told of it, all by its number."""
    logprob = -0.5 - number / 1000
    top = tuple((token + i, logprob - i) for i in range(request.num_top_logprobs))
    if not request.with_routing or token == request.eos_id:
        return NewToken(token, logprob, top)
    return NewToken(token, logprob, top, (number % (NUM_EXPERTS + 1),) * NUM_LAYERS, (0.5,) * NUM_LAYERS)


@dataclasses.dataclass(eq=False)
class FakeTicket:
    request: object
    on_event: object
    num_cached: int = 0
    is_cancelled: bool = False
    num_written: int = 0

    def __post_init__(self):
        self.tokens = tokens_of(self.request)
        self.num_cached = min(2, len(self.request.prompt) - 1)

    def cancel(self):
        self.is_cancelled = True


class FakeEngine:
    """Slots, a queue, cancellation and statistics as the real one has them."""

    def __init__(self, *, num_slots=4, max_waiting=100, step_seconds=0.0, fails_behind=None):
        self.num_slots, self.max_waiting, self.step_seconds = num_slots, max_waiting, step_seconds
        self.fails_behind = fails_behind
        self.running, self.waiting = [], collections.deque()
        self.num_generated = self.num_cancelled = 0
        self.changed = threading.Condition()
        self.ended = False

    def submit(self, request, on_event):
        with self.changed:
            if self.ended:
                raise RuntimeError("the engine has ended")
            if len(self.waiting) >= self.max_waiting:
                raise Full(f"{len(self.waiting)} requests wait already")
            ticket = FakeTicket(request, on_event)
            self.waiting.append(ticket)
            self.changed.notify_all()
        return ticket

    def stats(self):
        with self.changed:
            running, waiting = len(self.running), len(self.waiting)
            return EngineStats(running, waiting, self.num_slots - running, 0, 0, self.num_generated, 0)

    def wait_for_work(self, seconds):
        with self.changed:
            return self.changed.wait_for(lambda: bool(self.running or self.waiting), seconds)

    def step(self):
        time.sleep(self.step_seconds)
        with self.changed:
            while self.waiting and len(self.running) < self.num_slots:
                self.running.append(self.waiting.popleft())
            running = list(self.running)
        for ticket in running:
            events = list(self._events(ticket))
            for event in events:
                ticket.on_event(event)
            if events and not isinstance(events[-1], Tokens):
                with self.changed:
                    self.running.remove(ticket)
        with self.changed:
            return bool(self.running or self.waiting)

    def _events(self, ticket):
        if ticket.is_cancelled:
            self.num_cancelled += 1
            yield Finished("cancelled")
            return
        if ticket.num_written == self.fails_behind:
            yield Failed(FloatingPointError("no finite number"))
            return
        token = ticket.tokens[ticket.num_written]
        yield Tokens((new_token(ticket.request, ticket.num_written, token),))
        ticket.num_written += 1
        self.num_generated += 1
        if ticket.num_written == len(ticket.tokens):
            yield Finished("stop" if token == ticket.request.eos_id else "length")

    def end(self, error=None):
        with self.changed:
            self.ended = True
            left, self.running, self.waiting = [*self.running, *self.waiting], [], collections.deque()
        for ticket in left:
            ticket.on_event(Failed(error) if error else Finished("cancelled"))

    @contextlib.contextmanager
    def stepping(self):
        """A thread of its own, as `EngineThread` is one."""
        stop = threading.Event()

        def run():
            while not stop.is_set():
                if self.wait_for_work(0.02):
                    self.step()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            stop.set()
            thread.join()
            self.end()


def fake_scores(prompt, num_top):
    """Of each token but the first: its number a thousandth below 0."""
    logprobs = tuple(-token / 1000 for token in prompt[1:])
    top = tuple(tuple((token + i, -token / 1000 - i) for i in range(num_top)) for token in prompt[1:])
    return PromptScores(logprobs, top)


def fake_served(engine, **changes):
    """A run of bytes and chats behind the engine."""
    fields = {
        "name": "fake",
        "created": 1,
        "tokenizer": TOKENIZER,
        "chat_format": FORMAT,
        "engine": engine,
        "score": fake_scores,
        "vocab_size": TOKENIZER.vocab_size,
        "max_length": 512,
        "num_layers": NUM_LAYERS,
        "num_experts": NUM_EXPERTS,
        "num_places": engine.num_slots + engine.max_waiting,
    }
    return ServedRun(**(fields | changes))
