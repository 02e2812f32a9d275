"""Retention of checkpoints: rules, and the steps that they keep or remove."""

import dataclasses
import math
from collections.abc import Iterable, Mapping

from zaya_jax.errors import UserError
from zaya_jax.text_tables import format_bytes

NEWEST, EVERY, BEST, PHASE_END = "newest", "every", "best", "phase end"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Retention:
    """Rules for keeping checkpoints; a step is kept if at least one rule keeps it.

    Attributes:
      newest: number of newest checkpoints to keep.
      every: keep every step that is a multiple of this; None disables the rule.
      best: whether to keep the step with the lowest held-out loss.
      phase_ends: last steps of the phases, which are kept.
      min_free_bytes: bytes of the disk that must stay free after a save; None disables the check.
    """

    newest: int
    every: int | None = None
    best: bool = False
    phase_ends: frozenset[int] = frozenset()
    min_free_bytes: int | None = None


def rules_by_step(
    steps: Iterable[int], retention: Retention, *, losses: Mapping[int, float]
) -> dict[int, tuple[str, ...]]:
    """Names of the rules that keep each step; a step that no rule keeps has an empty tuple.

    Args:
      steps: existing checkpoints.
      retention: the rules.
      losses: held-out losses by step; steps without a checkpoint are ignored.
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
    """Steps that no rule keeps, oldest first.

    Args:
      steps: existing checkpoints.
      retention: the rules.
      losses: held-out losses by step.
      whole: newest step that is known to be intact. It is always kept, so that the run can resume.
    """
    # The newest intact step is kept even if its number is low, as after a rollback.
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
    """Steps to remove before the next save so that enough of the disk stays free, oldest first.

    Only steps that no rule but `newest` keeps are removed.

    Args:
      sizes: size in bytes of each existing checkpoint.
      retention: the rules, and the bytes that must stay free.
      losses: held-out losses by step.
      whole: newest step that is known to be intact, which is always kept; None if there is none.
      step_bytes: size in bytes of the next checkpoint.
      free_bytes: free bytes of the disk.

    Raises:
      UserError: if there is not enough space even without those steps.
    """
    # A checkpoint is written before older ones are removed, so both must fit.
    missing = step_bytes + (retention.min_free_bytes or 0) - free_bytes
    if retention.min_free_bytes is None or missing <= 0:
        return []
    rules, chosen = rules_by_step(sizes, retention, losses=losses), []
    for step, names in rules.items():
        # Steps that another rule keeps are never removed to make room.
        if missing > 0 and step != whole and set(names) <= {NEWEST}:
            chosen.append(step)
            missing -= sizes[step]
    if missing > 0:
        raise UserError(
            f"it needs {format_bytes(step_bytes)}, {format_bytes(free_bytes)} of the disk are free, and "
            f"train.min_free_gib requires {format_bytes(retention.min_free_bytes)} to stay free"
        )
    return chosen


def _best(steps: list[int], losses: Mapping[int, float]) -> int | None:
    """Step with the lowest finite loss; of equal ones the latest, which was trained for longest."""
    scored = [step for step in steps if math.isfinite(losses.get(step, math.nan))]
    return min(scored, key=lambda step: (losses[step], -step), default=None)
