"""A fake engine without a network, whose texts are known, so that responses can be checked."""

import collections
import contextlib
import dataclasses
import hashlib
import threading
import time

from zaya_jax.data.chats.templates.encoding import load_chat_format
from zaya_jax.data.tokenizers.tokenizer import load_tokenizer
from zaya_jax.inference.engine.prompt_scores import PromptScores
from zaya_jax.inference.engine.request import EngineStats, Failed, Finished, QueueFull, Tokens
from zaya_jax.inference.engine.sequence import NewToken
from zaya_jax.serving.loaded_model import LoadedModel

TOKENIZER = load_tokenizer("byte-chat")
FORMAT = load_chat_format("zaya", TOKENIZER)
END, THINK, THINK_END = (TOKENIZER.special_ids[name] for name in ("<|im_end|>", "<think>", "</think>"))
NUM_LAYERS, NUM_EXPERTS = 3, 4


def end_of(request):
    """Returns the first end token of a request."""
    return request.params.stop_token_ids[0]


def tokens_of(request):
    """Returns the generated tokens: a repeated word that depends on prompt and seed, then an end token."""
    digest = hashlib.sha256(repr((request.prompt, request.params.seed)).encode()).hexdigest()
    thought = (
        [THINK, *TOKENIZER.encode("hm"), THINK_END]
        if request.prompt[-1] == TOKENIZER.encode("?\n")[-1]
        else []
    )
    whole = [
        *thought,
        *TOKENIZER.encode(f"é{digest[:12]} " * (1 + int(digest[:2], 16) % 40)),
        end_of(request),
    ]
    return whole[: request.params.max_new_tokens]


def new_token(request, number, token):
    """Returns a token with log-probabilities and experts that depend on its position."""
    logprob = -0.5 - number / 1000
    top = tuple((token + i, logprob - i) for i in range(request.params.num_top_logprobs))
    if not request.params.with_routing or token == end_of(request):
        return NewToken(token, logprob, top)
    return NewToken(token, logprob, top, (number % (NUM_EXPERTS + 1),) * NUM_LAYERS, (0.5,) * NUM_LAYERS)


@dataclasses.dataclass(eq=False)
class FakeHandle:
    request: object
    on_event: object
    tokens: list
    num_cached: int = 0
    is_cancelled: bool = False
    num_written: int = 0

    def __post_init__(self):
        self.num_cached = min(2, len(self.request.prompt) - 1)

    def cancel(self):
        self.is_cancelled = True


class FakeEngine:
    """An engine with slots, a queue, cancellation and statistics like the real one."""

    def __init__(self, *, num_slots=4, max_waiting=100, step_seconds=0.0, fails_after=None):
        self.num_slots, self.max_waiting, self.step_seconds = num_slots, max_waiting, step_seconds
        self.fails_after = fails_after
        self.running, self.waiting = [], collections.deque()
        self.num_generated = self.num_cancelled = 0
        self.changed = threading.Condition()
        self.ended = False

    def tokens_of(self, request):
        return tokens_of(request)

    def submit(self, request, on_event):
        with self.changed:
            if self.ended:
                raise RuntimeError("the engine has ended")
            if len(self.waiting) >= self.max_waiting:
                raise QueueFull(f"{len(self.waiting)} requests wait already")
            ticket = FakeHandle(request, on_event, self.tokens_of(request))
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
        if ticket.num_written == self.fails_after:
            yield Failed(FloatingPointError("no finite number"))
            return
        token = ticket.tokens[ticket.num_written]
        yield Tokens((new_token(ticket.request, ticket.num_written, token),))
        ticket.num_written += 1
        self.num_generated += 1
        if ticket.num_written == len(ticket.tokens):
            yield Finished("stop" if token == end_of(ticket.request) else "length")

    def end(self, error=None):
        with self.changed:
            self.ended = True
            left, self.running, self.waiting = [*self.running, *self.waiting], [], collections.deque()
        for ticket in left:
            ticket.on_event(Failed(error) if error else Finished("cancelled"))

    @contextlib.contextmanager
    def stepping(self):
        """Runs the engine in a thread, like `EngineThread`."""
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
    """Returns scores of a prompt: the log-probability of token n is -n/1000."""
    logprobs = tuple(-token / 1000 for token in prompt[1:])
    top = tuple(tuple((token + i, -token / 1000 - i) for i in range(num_top)) for token in prompt[1:])
    return PromptScores(logprobs, top)


def fake_model(engine, **changes):
    """Returns a loaded model with a byte tokenizer, a chat template and the fake engine."""
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
        "capacity": engine.num_slots + engine.max_waiting,
    }
    return LoadedModel(**(fields | changes))
