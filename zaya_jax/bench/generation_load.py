"""What requests wait for when they come at random: our engine under load.

First many come at once, which says how many a second it can serve at most. Then they come as a Poisson
process at shares of that rate, whether or not those before them are done. A wait is counted from the moment
at which a request should have come.
"""

import collections
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from zaya_jax.bench.turns import answers_in_turn
from zaya_jax.config import ExecutionConfig
from zaya_jax.convert.pytorch import load_pytorch
from zaya_jax.inference.engine import Engine, Event, Failed, Request, Tokens

SLOTS, NUM_REQUESTS = 16, 48
SHARES = (0.25, 0.5, 0.75, 1.0)
PROMPTS, NEWS = (16, 256), (16, 64)
"""Tokens of a prompt and of its continuation: any number from the first to the second."""
LIMIT_SECONDS = 1800.0


@dataclasses.dataclass(frozen=True)
class Load:
    """What requests waited for at a rate.

    Attributes:
      share: of the rate that it can serve at most.
      rate: requests a second that came.
      tokens_per_second: new ones, from the first request to the last token.
      first_p50: seconds to a request's first token, the median.
      first_p99: of a hundred requests all but the slowest.
      next_p50: seconds for each further token of a request, on its own average; the median.
      next_p99: of a hundred.
    """

    share: float
    rate: float
    tokens_per_second: float
    first_p50: float
    first_p99: float
    next_p50: float
    next_p99: float


def loads(network: str) -> Iterator[Load]:
    """Waits at each share of what our engine can serve, of an exported network."""
    program = functools.partial(make_loads, network)
    yield from answers_in_turn({"engine": program}, rounds=1, limit=LIMIT_SECONDS)["engine"][0]


def make_loads(network: str) -> Callable[[], list[Load]]:
    """Gets an engine ready; a call loads it with all rates."""
    model, variables = load_pytorch(network, execution=ExecutionConfig(dtype="float32"))
    vocabulary = model.config.vocab_size
    length = PROMPTS[1] + NEWS[1]
    # Nothing is kept of prompts: none begins as another one did.
    engine = Engine(model, variables, num_slots=SLOTS, max_length=length, prefix_bytes=0)
    engine.warm_up()  # a program that the first call does not need would be compiled in a counted one

    def call() -> list[Load]:
        at_once = Served(engine, requests(0, vocabulary), [0.0] * NUM_REQUESTS)
        capacity = NUM_REQUESTS / at_once.run()
        found = []
        for number, share in enumerate(SHARES, 1):
            rate = share * capacity
            served = Served(engine, requests(number, vocabulary), arrivals(number, rate))
            seconds = served.run()
            found.append(served.load(share, rate, seconds))
        return found

    return call


def requests(seed: int, vocabulary: int) -> list[Request]:
    """Prompts of random tokens and lengths, each to be continued greedily by its own number of tokens."""
    numbers = np.random.default_rng((seed, 0))
    return [
        Request(
            prompt=tuple(numbers.integers(1, vocabulary, numbers.integers(*PROMPTS, endpoint=True)).tolist()),
            max_new_tokens=int(numbers.integers(*NEWS, endpoint=True)),
        )
        for _ in range(NUM_REQUESTS)
    ]


def arrivals(seed: int, rate: float) -> list[float]:
    """Seconds at which requests come: of a Poisson process, from the first one on."""
    gaps = np.random.default_rng((seed, 1)).exponential(1 / rate, NUM_REQUESTS - 1)
    return [0.0, *np.cumsum(gaps).tolist()]


class Served:
    """Requests that come to an engine at given moments, and when their tokens come."""

    def __init__(self, engine: Engine, asked: Sequence[Request], moments: Sequence[float]):
        """Notes who comes when, in seconds from the beginning."""
        self._engine, self._asked, self._moments = engine, asked, moments
        self._came: dict[int, list[float]] = collections.defaultdict(list)
        self._num_ended = 0
        self._error: Exception | None = None

    def run(self) -> float:
        """Serves them all, and gives the seconds that it took."""
        self._start = time.monotonic()
        num_sent = 0
        while self._num_ended < len(self._asked):
            now = time.monotonic() - self._start
            while num_sent < len(self._asked) and self._moments[num_sent] <= now:
                self._engine.submit(self._asked[num_sent], functools.partial(self._note, num_sent))
                num_sent += 1
            if self._error is not None:
                raise self._error
            # Who waits for nobody sleeps until the next one comes.
            if not self._engine.step() and num_sent < len(self._asked):
                time.sleep(max(0.0, self._moments[num_sent] - (time.monotonic() - self._start)))
        return time.monotonic() - self._start

    def _note(self, number: int, event: Event) -> None:
        if isinstance(event, Tokens):
            self._came[number] += [time.monotonic() - self._start] * len(event.new)
        elif isinstance(event, Failed):
            self._error = event.error
        else:
            self._num_ended += 1

    def load(self, share: float, rate: float, seconds: float) -> Load:
        """What the requests waited for, once all are served."""
        first = [came[0] - self._moments[number] for number, came in self._came.items()]
        # Tokens come a few at a time: of one request they are evened out, as a reader sees them.
        further = [(came[-1] - came[0]) / (len(came) - 1) for came in self._came.values()]
        num_tokens = sum(map(len, self._came.values()))
        waits = *np.quantile(first, (0.5, 0.99)).tolist(), *np.quantile(further, (0.5, 0.99)).tolist()
        return Load(share, rate, num_tokens / seconds, *waits)
