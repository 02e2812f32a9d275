"""The largest micro-batch and the cheapest remat policy that fit a GPU, by compiling."""

import dataclasses
import itertools
from collections.abc import Callable

from zaya_jax.config import Config
from zaya_jax.plan.memory import POLICIES, activation_bytes, memory_by_kind, working_bytes
from zaya_jax.plan.shares import micro_batch, num_groups, own_tokens

Measure = Callable[[Config], int]
"""Bytes that the train step of a config takes on each GPU."""

MAX_TRIALS = 12
"""Compilations of one search for the largest micro-batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A step that was compiled.

    Attributes:
      remat: its policy.
      micro_batch: sequences that a GPU has under way.
      num_bytes: that it takes on a GPU.
    """

    remat: str
    micro_batch: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
      trials: all that was compiled for it.
      cheapest_remat: the policy that recomputes least among those that fit the run's micro-batch; None
        if none fits.
      largest_micro_batch: of the policy that keeps least; 0 if not even one sequence fits.
      largest_remat: that policy.
    """

    trials: list[Trial]
    cheapest_remat: str | None
    largest_micro_batch: int
    largest_remat: str


def search(config: Config, num_devices: int, *, limit: int, measure: Measure) -> SearchResult:
    """Searches both.

    Args:
      config: of the run; its micro-batch is what the policy must fit.
      num_devices: of the cluster.
      limit: bytes of a GPU.
      measure: compiles.
    """
    trials: list[Trial] = []

    def size(remat: str, rows: int) -> int:
        known = [t.num_bytes for t in trials if (t.remat, t.micro_batch) == (remat, rows)]
        if not known:
            known = [measure(with_micro_batch(with_remat(config, remat), rows, num_devices))]
            trials.append(Trial(remat=remat, micro_batch=rows, num_bytes=known[0]))
        return known[0]

    rows = micro_batch(config, num_devices)
    guess = next(
        (i for i, remat in enumerate(POLICIES) if _expected(config, remat, num_devices) <= limit), -1
    )
    cheapest = cheapest_that_fits(lambda remat: size(remat, rows), limit=limit, guess=POLICIES[guess])
    last = POLICIES[-1]
    guess = _guess(with_remat(config, last), num_devices, limit)
    largest = largest_that_fits(lambda rows: size(last, rows), limit=limit, guess=guess)
    return SearchResult(
        trials=trials, cheapest_remat=cheapest, largest_micro_batch=largest, largest_remat=last
    )


def cheapest_that_fits(size: Callable[[str], int], *, limit: int, guess: str) -> str | None:
    """The policy that recomputes least among those whose size is within the limit; None if none is.

    Args:
      size: of a policy; each later one in `POLICIES` takes less.
      limit: of the size.
      guess: where to begin.
    """
    start = POLICIES.index(guess)
    if size(guess) > limit:
        return next((remat for remat in POLICIES[start + 1 :] if size(remat) <= limit), None)
    cheaper = itertools.takewhile(lambda remat: size(remat) <= limit, reversed(POLICIES[:start]))
    return [guess, *cheaper][-1]


def largest_that_fits(size: Callable[[int], int], *, limit: int, guess: int) -> int:
    """The largest whole number whose size is within the limit; 0 if that of 1 is not.

    Args:
      size: grows with its argument, about evenly.
      limit: of the size.
      guess: where to begin.
    """
    fits, fails = 0, None
    at = max(guess, 1)
    for _ in range(MAX_TRIALS):
        if size(at) <= limit:
            fits = at
        else:
            fails = at
        if fails is not None and fails - fits == 1:
            break
        at = _next(size, fits, fails, limit)
    return fits


def with_remat(config: Config, remat: str) -> Config:
    """The same run with another policy."""
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, remat=remat))


def with_micro_batch(config: Config, rows: int, num_devices: int) -> Config:
    """The same run, one microbatch of so many sequences a step, a device or a group that shares them."""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=rows * num_groups(config, num_devices)),
        execution=dataclasses.replace(config.execution, num_microbatches=1),
    )


def _expected(config: Config, remat: str, num_devices: int) -> int:
    """Bytes of the run's micro-batch with a policy, by arithmetic."""
    rows = micro_batch(config, num_devices)
    return sum(
        memory_by_kind(with_micro_batch(with_remat(config, remat), rows, num_devices), num_devices).values()
    )


def _guess(config: Config, num_devices: int, limit: int) -> int:
    """By arithmetic."""
    one = with_micro_batch(config, 1, num_devices)
    time = own_tokens(config)
    network = config.model, config.execution
    a_row = activation_bytes(*network, time) + working_bytes(*network, time)
    return max(int((limit - sum(memory_by_kind(one, num_devices).values())) / a_row) + 1, 1)


def _next(size: Callable[[int], int], fits: int, fails: int | None, limit: int) -> int:
    """Where a straight line through what is known meets the limit, between what fits and what does not."""
    if fails is None:
        return fits * 2
    if not fits:
        return fails // 2
    line = fits + (limit - size(fits)) * (fails - fits) / (size(fails) - size(fits))
    return min(max(int(line), fits + 1), fails - 1)
