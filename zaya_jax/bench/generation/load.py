"""Latency of requests that arrive at random times at our engine.

First, many requests arrive at once, which measures the engine's capacity in requests per second. Then
requests arrive as a Poisson process at shares of that capacity, whether or not earlier requests are finished.
Latency counts from the scheduled arrival time. Many short prompts at once are measured on their own.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zaya_jax.bench.interleaved import results_interleaved
from zaya_jax.config import ExecutionConfig
from zaya_jax.convert.pytorch.in_memory import load_pytorch
from zaya_jax.inference.engine.engine import Engine
from zaya_jax.inference.engine.request import Event, Failed, Request, Tokens
from zaya_jax.inference.engine.sampling_params import SamplingParams

SLOTS, NUM_REQUESTS = 16, 48
SHARES = (0.25, 0.5, 0.75, 1.0)
PROMPTS, NEW_TOKENS = (16, 256), (16, 64)
"""Smallest and largest number of tokens of a prompt and of its continuation."""
NUM_SHORT, SHORT_PROMPTS, SHORT_ANSWER = 32, (16, 64), 8
"""Short prompts that arrive at once: their number, their sizes and the tokens of each answer."""
SHORT_ROUNDS = 3
LIMIT_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class Load:
    """Latency of requests at an arrival rate.

    Attributes:
      share: arrival rate relative to the engine's capacity.
      rate: arrival rate in requests per second.
      tokens_per_second: new tokens per second, from the first request to the last token.
      first_p50: median seconds until a request's first token.
      first_p99: 99th percentile of the same.
      next_p50: median over requests of the mean seconds per further token.
      next_p99: 99th percentile of the same.
    """

    share: float
    rate: float
    tokens_per_second: float
    first_p50: float
    first_p99: float
    next_p50: float
    next_p99: float


@dataclasses.dataclass(frozen=True)
class ShortPrompts:
    """Latency of many short prompts that arrive at once.

    Attributes:
      prompts_per_second: answered prompts per second.
      first_p50: median seconds until a prompt's first token.
      first_p99: 99th percentile of the same.
    """

    prompts_per_second: float
    first_p50: float
    first_p99: float


def short_prompts(network: str) -> list[ShortPrompts]:
    """Returns the latency of short prompts to an exported network, in each of a few rounds."""
    program = functools.partial(make_short_prompts, network)
    return results_interleaved({"engine": program}, rounds=SHORT_ROUNDS, limit=LIMIT_SECONDS)["engine"]


def make_short_prompts(network: str) -> Callable[[], ShortPrompts]:
    """Prepares an engine; a call measures one round."""
    engine, vocabulary = _load_engine(network, SHORT_PROMPTS[1] + SHORT_ANSWER)
    # The same prompts in every round, so that rounds differ by the machine alone.
    numbers = np.random.default_rng(0)
    sizes = SHORT_PROMPTS, (SHORT_ANSWER, SHORT_ANSWER)
    prompts = [_random_request(numbers, vocabulary, *sizes) for _ in range(NUM_SHORT)]

    def call() -> ShortPrompts:
        # All at time zero: most of them wait for a slot, which their first token shows.
        served = ServedRequests(engine, prompts, [0.0] * NUM_SHORT)
        seconds = served.run()
        return ShortPrompts(NUM_SHORT / seconds, *_p50_and_p99(served.first_waits()))

    return call


def loads(network: str) -> Iterator[Load]:
    """Yields the latency of an exported network's requests at each share of the engine's capacity."""
    program = functools.partial(make_loads, network)
    # In a separate process, like the programs of other benchmarks, although nothing alternates with it.
    yield from results_interleaved({"engine": program}, rounds=1, limit=LIMIT_SECONDS)["engine"][0]


def make_loads(network: str) -> Callable[[], list[Load]]:
    """Prepares an engine; a call measures all arrival rates."""
    engine, vocabulary = _load_engine(network, PROMPTS[1] + NEW_TOKENS[1])

    def call() -> list[Load]:
        # All requests at time zero: their total time measures the engine's capacity.
        at_once = ServedRequests(engine, requests(0, vocabulary), [0.0] * NUM_REQUESTS)
        capacity = NUM_REQUESTS / at_once.run()
        results = []
        for number, share in enumerate(SHARES, 1):
            # Each rate has its own seed; seed 0 made the requests that measured the capacity.
            rate = share * capacity
            served = ServedRequests(engine, requests(number, vocabulary), arrivals(number, rate))
            seconds = served.run()
            results.append(served.load(share, rate, seconds))
        return results

    return call


def _load_engine(network: str, length: int) -> tuple[Engine, int]:
    """Returns an engine whose programs are compiled, and the size of its vocabulary."""
    model, variables = load_pytorch(network, execution=ExecutionConfig(dtype="float32"))
    # No prefix cache: the random prompts share no prefixes.
    engine = Engine(model, variables, num_slots=SLOTS, max_length=length, prefix_bytes=0)
    # Otherwise a program that the untimed call does not need would compile in a timed one.
    engine.warm_up()
    return engine, model.config.vocab_size


def requests(seed: int, vocabulary: int) -> list[Request]:
    """Returns prompts of random tokens and lengths, each with a random number of new tokens, decoded
    greedily.
    """
    # The second number separates these draws from those of the arrival times.
    numbers = np.random.default_rng((seed, 0))
    return [_random_request(numbers, vocabulary, PROMPTS, NEW_TOKENS) for _ in range(NUM_REQUESTS)]


def _random_request(
    numbers: np.random.Generator, vocabulary: int, prompts: tuple[int, int], new_tokens: tuple[int, int]
) -> Request:
    return Request(
        tuple(numbers.integers(1, vocabulary, numbers.integers(*prompts, endpoint=True)).tolist()),
        SamplingParams(max_new_tokens=int(numbers.integers(*new_tokens, endpoint=True))),
    )


def arrivals(seed: int, rate: float) -> list[float]:
    """Returns arrival times in seconds of a Poisson process, beginning with the first request."""
    # Exponential gaps make a Poisson process.
    gaps = np.random.default_rng((seed, 1)).exponential(1 / rate, NUM_REQUESTS - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


class ServedRequests:
    """Requests that arrive at an engine at given times, and the times of their tokens."""

    def __init__(self, engine: Engine, requests: Sequence[Request], moments: Sequence[float]):
        """Schedules the requests; `moments` are arrival times in seconds from the start."""
        self._engine, self._requests, self._moments = engine, requests, moments
        self._came: dict[int, list[float]] = collections.defaultdict(list)
        self._num_ended = 0
        self._error: Exception | None = None

    def run(self) -> float:
        """Serves all requests and returns the elapsed seconds."""
        self._start = time.monotonic()
        num_sent = 0
        while self._num_ended < len(self._requests):
            now = time.monotonic() - self._start
            while num_sent < len(self._requests) and self._moments[num_sent] <= now:
                self._engine.submit(self._requests[num_sent], functools.partial(self._note, num_sent))
                num_sent += 1
            if self._error is not None:
                raise self._error
            # An idle engine sleeps until the next request arrives.
            if not self._engine.step() and num_sent < len(self._requests):
                # The moment may have passed since the time was read above.
                time.sleep(max(0.0, self._moments[num_sent] - (time.monotonic() - self._start)))
        return time.monotonic() - self._start

    def _note(self, number: int, event: Event) -> None:
        if isinstance(event, Tokens):
            # The tokens of one event have arrived together.
            self._came[number] += [time.monotonic() - self._start] * len(event.new)
        elif isinstance(event, Failed):
            # Raised later by `run`, because an exception here would interrupt the engine's own step.
            self._error = event.error
        else:
            self._num_ended += 1

    def first_waits(self) -> list[float]:
        """Seconds until the first token of each request, after `run`."""
        # From the scheduled arrival: a request that is submitted late, because the engine was busy, has
        # waited too.
        return [came[0] - self._moments[number] for number, came in self._came.items()]

    def load(self, share: float, rate: float, seconds: float) -> Load:
        """Returns the latencies after `run`."""
        # The engine emits a few tokens at a time: average the gaps within a request.
        further = [(came[-1] - came[0]) / (len(came) - 1) for came in self._came.values()]
        num_tokens = sum(map(len, self._came.values()))
        waits = *_p50_and_p99(self.first_waits()), *_p50_and_p99(further)
        return Load(share, rate, num_tokens / seconds, *waits)


def _p50_and_p99(values: Sequence[float]) -> tuple[float, float]:
    middle, high = np.quantile(values, (0.5, 0.99)).tolist()
    return middle, high
