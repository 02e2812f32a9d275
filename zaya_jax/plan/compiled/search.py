"""Search for the largest micro-batch, the remat policies and the fewest GPUs per sequence that fit, by
compiling.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.parallel.mesh import check_batch_size
from zaya_jax.plan.memory import POLICIES, activation_bytes, memory_by_kind, working_bytes
from zaya_jax.plan.shares import micro_batch, num_groups, own_tokens, with_execution

Measure = Callable[[Config], int]
"""Returns the bytes per GPU of the train step of a config."""
ModelTime = Callable[[Config], float]
"""Returns the modelled seconds of the train step of a config."""

MAX_TRIALS = 12
"""Maximum number of compilations in the search for the largest micro-batch."""

Choice = TypeVar("Choice")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A compiled step.

    Attributes:
      remat: its remat policy.
      micro_batch: sequences that a GPU processes at a time, alone or with others.
      context_devices: GPUs per sequence.
      num_bytes: bytes per GPU.
    """

    remat: str
    micro_batch: int
    context_devices: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """A step whose experts are shared by GPUs of a node.

    Attributes:
      node_devices: number of GPUs that share; 1 means that each GPU has all experts.
      num_bytes: bytes per GPU.
      seconds: modelled time; None if the step does not fit.
    """

    node_devices: int
    num_bytes: int
    seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """Result of a search.

    Attributes:
      trials: all compiled steps.
      cheapest_remat: the policy with least recomputation that fits the run's micro-batch; None if none fits.
      seconds: modelled time of a step of that micro-batch, by policy that fits.
      sharings: the run's own step by number of GPUs that share the experts.
      largest_micro_batch: largest micro-batch that fits with the policy that keeps least; 0 if none fits.
      largest_remat: that policy.
      fewest_context_devices: fewest GPUs per sequence with which one sequence fits under that policy, among
        the powers of two and the run's own number that divide its batch; None if none fits.
    """

    trials: list[Trial]
    cheapest_remat: str | None
    seconds: dict[str, float]
    sharings: list[Sharing]
    largest_micro_batch: int
    largest_remat: str
    fewest_context_devices: int | None

    @property
    def fastest_remat(self) -> str | None:
        """The policy with the shortest step; None if none fits.

        This is not always the policy with least recomputation: kept activations must be written and read
        again.
        """
        return min(self.seconds, key=self.seconds.__getitem__, default=None)


def search(
    config: Config,
    num_devices: int,
    *,
    gpus_per_node: int = 1,
    limit: int,
    measure: Measure,
    model_time: ModelTime,
) -> SearchResult:
    """Runs all searches. Each varies one setting and keeps the run's value of the others, or the smallest
    where stated.

    Args:
      config: config of the run; policies must fit its micro-batch.
      num_devices: GPUs of the cluster.
      gpus_per_node: GPUs per node, which may share the experts.
      limit: bytes of a GPU.
      measure: compiles until the memory is known.
      model_time: compiles completely.
    """
    trials: list[Trial] = []

    # A step that has been compiled for another search is not compiled again.
    @functools.cache
    def size(remat: str, rows: int, ranks: int) -> int:
        tried = with_execution(config, remat=remat, context_devices=ranks)
        num_bytes = measure(with_micro_batch(tried, rows, num_devices))
        trials.append(Trial(remat=remat, micro_batch=rows, context_devices=ranks, num_bytes=num_bytes))
        return num_bytes

    def sharing(count: int) -> Sharing:
        shared = with_micro_batch(with_execution(config, node_devices=count), rows, num_devices)
        num_bytes = measure(shared)
        seconds = model_time(shared) if num_bytes <= limit else None
        return Sharing(node_devices=count, num_bytes=num_bytes, seconds=seconds)

    rows, ranks = micro_batch(config, num_devices), config.execution.context_devices
    # The first policy that fits by arithmetic, with one microbatch per step.
    one = with_micro_batch(config, rows, num_devices)
    guess = next((remat for remat in POLICIES if _expected(one, remat, num_devices) <= limit), POLICIES[-1])
    cheapest = cheapest_that_fits(lambda remat: size(remat, rows, ranks), POLICIES, limit=limit, guess=guess)
    # Policies after this one keep less, so that they fit as well.
    fitting = () if cheapest is None else POLICIES[POLICIES.index(cheapest) :]
    seconds = {
        remat: model_time(with_micro_batch(with_execution(config, remat=remat), rows, num_devices))
        for remat in fitting
    }
    last = POLICIES[-1]
    guess = _guess(with_execution(config, remat=last), num_devices, limit)
    largest = largest_that_fits(lambda rows: size(last, rows, ranks), limit=limit, guess=guess)
    fewest = cheapest_that_fits(
        lambda ranks: size(last, 1, ranks),
        context_devices_of(config, num_devices),
        limit=limit,
        guess=ranks,
    )
    return SearchResult(
        trials=trials,
        cheapest_remat=cheapest,
        seconds=seconds,
        sharings=[sharing(count) for count in sorted({1, config.execution.node_devices, gpus_per_node})],
        largest_micro_batch=largest,
        largest_remat=last,
        fewest_context_devices=fewest,
    )


def context_devices_of(config: Config, num_devices: int) -> list[int]:
    """Possible numbers of GPUs per sequence, ascending: the run's own and powers of two."""
    numbers = {config.execution.context_devices}
    for ranks in (2**power for power in range(num_devices.bit_length())):
        # Invalid: too few tokens for so many GPUs, or fewer sequences than groups of GPUs.
        with contextlib.suppress(UserError):
            check_batch_size(config.data.batch_size, 1, num_devices, ranks)
            numbers.add(with_execution(config, context_devices=ranks).execution.context_devices)
    return sorted(numbers)


def cheapest_that_fits(
    size: Callable[[Choice], int], choices: Sequence[Choice], *, limit: int, guess: Choice
) -> Choice | None:
    """Returns the first choice whose size is within the limit; None if there is none.

    Args:
      size: size of a choice; it decreases along the choices.
      choices: choices by increasing cost in time.
      limit: maximum size.
      guess: choice to start from.
    """
    # Start from the arithmetic guess, which is usually right or next to the answer.
    start = choices.index(guess)
    if size(guess) > limit:
        return next((choice for choice in choices[start + 1 :] if size(choice) <= limit), None)
    # Lazily, because each size takes a compilation: none follows the first choice that does not fit.
    cheaper = itertools.takewhile(lambda choice: size(choice) <= limit, reversed(choices[:start]))
    return [guess, *cheaper][-1]


def largest_that_fits(size: Callable[[int], int], *, limit: int, guess: int) -> int:
    """Returns the largest integer whose size is within the limit; 0 if 1 does not fit.

    Args:
      size: size of an integer; it grows about linearly.
      limit: maximum size.
      guess: integer to start from.
    """
    fits, fails = 0, None
    at = max(guess, 1)
    # Each size takes a compilation, so that the number of trials is limited.
    for _ in range(MAX_TRIALS):
        if size(at) <= limit:
            fits = at
        else:
            fails = at
        # No integer is left between what fits and what does not.
        if fails is not None and fails - fits == 1:
            break
        at = _next(size, fits, fails, limit)
    return fits


def with_micro_batch(config: Config, rows: int, num_devices: int) -> Config:
    """Returns the run with one microbatch per step of the given number of sequences per device or group."""
    data = dataclasses.replace(config.data, batch_size=rows * num_groups(config, num_devices))
    return dataclasses.replace(with_execution(config, num_microbatches=1), data=data)


def _expected(config: Config, remat: str, num_devices: int) -> int:
    """Bytes of the run with a policy, by arithmetic."""
    return sum(memory_by_kind(with_execution(config, remat=remat), num_devices).values())


def _guess(config: Config, num_devices: int, limit: int) -> int:
    """Estimated largest micro-batch, by arithmetic."""
    one = with_micro_batch(config, 1, num_devices)
    time = own_tokens(config)
    network = config.model, config.execution
    a_row = activation_bytes(*network, time) + working_bytes(*network, time)
    # One sequence is part of the memory of `one` already.
    return max(int((limit - _expected(one, config.execution.remat, num_devices)) / a_row) + 1, 1)


def _next(size: Callable[[int], int], fits: int, fails: int | None, limit: int) -> int:
    """Next candidate: where a line through the known sizes meets the limit, between the values that fit and
    do not.
    """
    if fails is None:
        # No size has failed yet, and one point makes no line.
        return fits * 2
    if not fits:
        return fails // 2
    # The size grows about linearly with the micro-batch, so interpolation needs few compilations.
    line = fits + (limit - size(fits)) * (fails - fits) / (size(fails) - size(fits))
    return min(max(int(line), fits + 1), fails - 1)
