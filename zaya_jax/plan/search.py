"""The largest micro-batch, the remat policies and fewest GPUs a sequence that fit, by compiling."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TypeVar

from zaya_jax.config import Config
from zaya_jax.parallel.mesh import check_batch_size
from zaya_jax.plan.memory import POLICIES, activation_bytes, memory_by_kind, working_bytes
from zaya_jax.plan.shares import micro_batch, num_groups, own_tokens

Measure = Callable[[Config], int]
"""Bytes that the train step of a config takes on each GPU."""
ModelTime = Callable[[Config], float]
"""Seconds that the train step of a config takes by a model."""

MAX_TRIALS = 12
"""Compilations of one search for the largest micro-batch."""

Choice = TypeVar("Choice")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """A step that was compiled.

    Attributes:
      remat: its policy.
      micro_batch: sequences that a GPU has under way, alone or with others.
      context_devices: GPUs that share a sequence.
      num_bytes: that it takes on a GPU.
    """

    remat: str
    micro_batch: int
    context_devices: int
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharing:
    """A step whose experts some GPUs of a node share.

    Attributes:
      node_devices: how many; 1 where each GPU has all experts.
      num_bytes: that it takes on a GPU.
      seconds: of it by a model; None where it does not fit.
    """

    node_devices: int
    num_bytes: int
    seconds: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What a search found.

    Attributes:
      trials: all that was compiled for it.
      cheapest_remat: the policy that recomputes least among those that fit the run's micro-batch; None
        if none fits.
      seconds: of a step of that micro-batch by a model, by policy, of those that fit.
      sharings: of the run's own step, by how many GPUs of a node share the experts.
      largest_micro_batch: of the policy that keeps least; 0 if not even one sequence fits.
      largest_remat: that policy.
      fewest_context_devices: the fewest GPUs a sequence with which that policy fits, one sequence at a time;
        of powers of two, and the run's own number, to which its batch can be dealt. None if with none.
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
        """The policy whose step is shortest; None if none fits.

        Not always the one that recomputes least: what is kept must be written and read again.
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
    """Searches all of it, each with the run's own choice of the others or, where it says so, the smallest.

    Args:
      config: of the run; its micro-batch is what the policy must fit.
      num_devices: of the cluster.
      gpus_per_node: of the cluster, which may share the experts.
      limit: bytes of a GPU.
      measure: compiles as far as that is known.
      model_time: compiles to the end.
    """
    trials: list[Trial] = []

    def size(remat: str, rows: int, ranks: int = config.execution.context_devices) -> int:
        known = [
            t.num_bytes for t in trials if (t.remat, t.micro_batch, t.context_devices) == (remat, rows, ranks)
        ]
        if not known:
            tried = with_execution(config, remat=remat, context_devices=ranks)
            known = [measure(with_micro_batch(tried, rows, num_devices))]
            trials.append(Trial(remat=remat, micro_batch=rows, context_devices=ranks, num_bytes=known[0]))
        return known[0]

    rows = micro_batch(config, num_devices)
    expected = (_expected(with_execution(config, remat=remat), num_devices) for remat in POLICIES)
    guess = next(
        (remat for remat, size in zip(POLICIES, expected, strict=True) if size <= limit), POLICIES[-1]
    )
    cheapest = cheapest_that_fits(lambda remat: size(remat, rows), POLICIES, limit=limit, guess=guess)
    fitting = () if cheapest is None else POLICIES[POLICIES.index(cheapest) :]
    seconds = {
        remat: model_time(with_micro_batch(with_execution(config, remat=remat), rows, num_devices))
        for remat in fitting
    }
    last = POLICIES[-1]
    guess = _guess(with_execution(config, remat=last), num_devices, limit)
    largest = largest_that_fits(lambda rows: size(last, rows), limit=limit, guess=guess)
    fewest = cheapest_that_fits(
        lambda ranks: size(last, 1, ranks),
        context_devices_of(config, num_devices),
        limit=limit,
        guess=config.execution.context_devices,
    )
    return SearchResult(
        trials=trials,
        cheapest_remat=cheapest,
        seconds=seconds,
        sharings=[
            _sharing(
                with_micro_batch(with_execution(config, node_devices=count), rows, num_devices),
                limit=limit,
                measure=measure,
                model_time=model_time,
            )
            for count in sorted({1, config.execution.node_devices, gpus_per_node})
        ],
        largest_micro_batch=largest,
        largest_remat=last,
        fewest_context_devices=fewest,
    )


def _sharing(config: Config, *, limit: int, measure: Measure, model_time: ModelTime) -> Sharing:
    num_bytes = measure(config)
    seconds = model_time(config) if num_bytes <= limit else None
    return Sharing(node_devices=config.execution.node_devices, num_bytes=num_bytes, seconds=seconds)


def context_devices_of(config: Config, num_devices: int) -> list[int]:
    """How many GPUs may share each sequence of a run, ascending: its own number and powers of two."""
    found = {config.execution.context_devices}
    for ranks in (2**power for power in range(num_devices.bit_length())):
        # Refused: too few tokens for so many, or fewer sequences than there are groups of GPUs.
        with contextlib.suppress(ValueError):
            check_batch_size(config.data.batch_size, 1, num_devices, ranks)
            found.add(with_execution(config, context_devices=ranks).execution.context_devices)
    return sorted(found)


def cheapest_that_fits(
    size: Callable[[Choice], int], choices: Sequence[Choice], *, limit: int, guess: Choice
) -> Choice | None:
    """The first of some choices whose size is within the limit; None if none is.

    Args:
      size: of a choice; each later one takes less.
      choices: from the one that costs least time to the one that costs most.
      limit: of the size.
      guess: where to begin.
    """
    start = choices.index(guess)
    if size(guess) > limit:
        return next((choice for choice in choices[start + 1 :] if size(choice) <= limit), None)
    cheaper = itertools.takewhile(lambda choice: size(choice) <= limit, reversed(choices[:start]))
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


def with_execution(config: Config, **changes: str | int) -> Config:
    """The same run, executed otherwise."""
    return dataclasses.replace(config, execution=dataclasses.replace(config.execution, **changes))  # pyright: ignore[reportArgumentType]


def with_micro_batch(config: Config, rows: int, num_devices: int) -> Config:
    """The same run, one microbatch of so many sequences a step, a device or a group that shares them."""
    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, batch_size=rows * num_groups(config, num_devices)),
        execution=dataclasses.replace(config.execution, num_microbatches=1),
    )


def _expected(config: Config, num_devices: int) -> int:
    """Bytes of the run's micro-batch, by arithmetic."""
    rows = micro_batch(config, num_devices)
    return sum(memory_by_kind(with_micro_batch(config, rows, num_devices), num_devices).values())


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
