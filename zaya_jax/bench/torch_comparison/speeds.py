"""Speeds of all programs as medians of paired rounds, and the agreement of their outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from zaya_jax.bench.interleaved import results_interleaved
from zaya_jax.bench.torch_comparison.workload import Call

OURS = "ours"
COMPILE_SECONDS = 3600.0
"""Timeout for preparing a program: `torch.compile` generates and compiles C++."""
TOLERANCE = 1e-4
"""Largest difference of an output: that of whole models in float32."""
MAX_SHARE, TIE_TOLERANCE = 0.01, 0.01
"""Largest share of outputs with a larger difference, and the largest difference of those. Where two experts
of a token have nearly the same score, rounding decides which one it gets: at batch 64 that changed 2 of 2,048
log-probabilities, by 0.0013."""


@dataclasses.dataclass(frozen=True)
class PairedSpeed:
    """PairedSpeed of a program in a part of its work.

    Attributes:
      work: part and batch size.
      side: name of the program.
      tokens_per_second: median of all rounds.
      bound: upper bound of the machine, in tokens per second.
      ratios: our speed relative to this program's, in each round.
      setting: how the program computes, if it selected that.
    """

    work: str
    side: str
    tokens_per_second: float
    bound: float
    ratios: tuple[float, ...]
    setting: str = ""

    @property
    def ratio(self) -> float:
        """Median over the rounds of our speed relative to this program's."""
        return float(np.median(self.ratios))


@dataclasses.dataclass(frozen=True)
class Part:
    """A timed part of a call.

    Attributes:
      name: key of its seconds in `Call`.
      work: description in tables.
      num_tokens: tokens that the part processes.
      bound: upper bound of tokens per second.
    """

    name: str
    work: str
    num_tokens: int
    bound: float


def measure(
    programs: Mapping[str, Callable[[], Callable[[], Call]]], parts: Sequence[Part], *, rounds: int
) -> list[PairedSpeed]:
    """Runs all programs alternately and returns their speeds by part.

    Args:
      programs: programs by name; one is "ours".
      parts: timed parts of each call.
      rounds: number of timed calls of each program. The first, untimed call is checked.

    Raises:
      RuntimeError: if outputs do not agree, or a program fails.
    """
    # The first calls compile. They are checked before anything is timed.
    calls = results_interleaved(dict(programs), rounds=rounds, limit=COMPILE_SECONDS, check=check_agreement)
    return [_speed(part, side, calls) for part in parts for side in calls]


def _speed(part: Part, side: str, calls: Mapping[str, Sequence[Call]]) -> PairedSpeed:
    seconds, ours = (np.array([call.seconds[part.name] for call in calls[name]]) for name in (side, OURS))
    # Both calls of a round are seconds apart: a slow period of the machine affects both.
    ratios = tuple((seconds / ours).tolist())
    # The median, because one slow round must not decide, and neither must one fast one.
    speed = part.num_tokens / float(np.median(seconds))
    return PairedSpeed(part.work, side, speed, part.bound, ratios, calls[side][0].setting)


def check_agreement(calls: Mapping[str, Any]) -> None:
    """Checks that the outputs of all programs are ours within `TOLERANCE`.

    A share of `MAX_SHARE` of them needs to be within `TIE_TOLERANCE` only. Tokens are all equal.

    Raises:
      RuntimeError: if outputs of a program differ by more.
    """
    for side, call in calls.items():
        for name, expected in calls[OURS].outputs.items():
            # Tokens are whole numbers: a different one exceeds both tolerances.
            differences = np.abs(np.asarray(call.outputs[name]) - expected)
            # Not "greater", because NaN is no agreement.
            most = np.quantile(differences, 1 - MAX_SHARE, method="higher")
            if not (most <= TOLERANCE and np.max(differences) <= TIE_TOLERANCE):
                raise RuntimeError(f'{name} of "{side}" differ from ours by {np.max(differences):.2g}')
