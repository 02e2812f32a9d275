"""Which checkpoints of a run stay: rules, and what they say of the steps that are there."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from zaya_jax.tables import format_bytes

NEWEST, EVERY, BEST, PHASE_END = "newest", "every", "best", "phase end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """What stays of a run's checkpoints; a step stays when one rule keeps it.

    Attributes:
      newest: how many of the newest stay.
      every: a step that is a multiple of this stays for ever; None for no such rule.
      best: whether the step with the lowest held-out loss stays.
      phase_ends: steps that end a phase; they stay for ever.
      min_free_bytes: of the disk, that a save leaves free; None to fill it.
    """

    newest: int
    every: int | None = None
    best: bool = False
    phase_ends: frozenset[int] = frozenset()
    min_free_bytes: int | None = None


def rules_by_step(
    steps: Iterable[int], retention: Retention, *, losses: Mapping[int, float]
) -> dict[int, tuple[str, ...]]:
    """The rules that keep each step, by their names; a step without any goes.

    Args:
      steps: that are there.
      retention: the rules.
      losses: held-out losses by step, some of them of steps that are not there.
    """
    present = sorted(steps)
    newest, best = present[-retention.newest :], _best(present, losses) if retention.best else None
    return {
        step: tuple(
            name
            for name, keeps in (
                (NEWEST, step in newest),
                (EVERY, retention.every is not None and step % retention.every == 0),
                (BEST, step == best),
                (PHASE_END, step in retention.phase_ends),
            )
            if keeps
        )
        for step in present
    }


def steps_to_remove(
    steps: Iterable[int], retention: Retention, *, losses: Mapping[int, float], whole: int
) -> list[int]:
    """The steps that no rule keeps, oldest first.

    Args:
      steps: that are there.
      retention: the rules.
      losses: held-out losses by step.
      whole: the newest step that is known to be whole: whatever its number is, a run could go on from it.
    """
    rules = rules_by_step(steps, retention, losses=losses)
    return [step for step, names in rules.items() if not names and step != whole]


def steps_to_make_room(
    sizes: Mapping[int, int],
    retention: Retention,
    *,
    losses: Mapping[int, float],
    whole: int | None,
    step_bytes: int,
    free_bytes: int,
) -> list[int]:
    """The steps that must go before another is written, oldest first: none while there is room for it.

    Only those go that nothing but their being new keeps.

    Args:
      sizes: bytes of each step that is there.
      retention: the rules, and the bytes that are to stay free.
      losses: held-out losses by step.
      whole: the newest step that is known to be whole, which never goes; None before the first.
      step_bytes: that will be written.
      free_bytes: of the disk.

    Raises:
      ValueError: if there is no room even without them.
    """
    missing = step_bytes + (retention.min_free_bytes or 0) - free_bytes
    if retention.min_free_bytes is None or missing <= 0:
        return []
    rules, chosen = rules_by_step(sizes, retention, losses=losses), []
    for step, names in rules.items():
        if missing > 0 and step != whole and set(names) <= {NEWEST}:
            chosen.append(step)
            missing -= sizes[step]
    if missing > 0:
        raise ValueError(
            f"it takes {format_bytes(step_bytes)}, {format_bytes(free_bytes)} of the disk are free, and "
            f"{format_bytes(retention.min_free_bytes)} are to stay so"
        )
    return chosen


def _best(steps: list[int], losses: Mapping[int, float]) -> int | None:
    """Of two that are equal the later one, which has learned more."""
    scored = [step for step in steps if math.isfinite(losses.get(step, math.nan))]
    return min(scored, key=lambda step: (losses[step], -step), default=None)
