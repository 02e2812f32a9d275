"""Speeds of all programs as medians of paired rounds, and the agreement of their outputs."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.bench.interleaved import results_interleaved
from zaya_jax.bench.torch_comparison.workload import TOKENS, Call

OURS = "ours"
COMPILE_SECONDS = 3600.0
"""Timeout for preparing a program: `torch.compile` generates and compiles C++."""


class Tolerance(NamedTuple):
    """How far outputs of two implementations may differ.

    Where two experts of a token have nearly the same score, rounding decides which one it gets: in float32 at
    batch 64 that changed 2 of 2,048 log-probabilities, by 0.0013.
    """

    usual: float
    """Largest difference of an output."""
    tie: float
    """Largest difference of a few outputs with other experts."""
    tie_share: float
    """Largest share of those."""
    equal_texts: bool
    """Whether all tokens must be equal. In bfloat16 the most likely tokens are often nearly as likely."""


TOLERANCES = {
    "float32": Tolerance(1e-4, 0.01, 0.01, equal_texts=True),
    # transformers' residual stream is bfloat16 too. With the network of the benchmark its log-probabilities
    # differ from those in float32 by up to 0.08, and ours by up to 0.03.
    "bfloat16": Tolerance(0.15, 0.3, 0.05, equal_texts=False),
}
"""By dtype of matrix products."""


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
    programs: Mapping[str, Callable[[], Callable[[], Call]]],
    parts: Sequence[Part],
    *,
    rounds: int,
    dtype: str = "float32",
) -> list[PairedSpeed]:
    """Runs all programs alternately and returns their speeds by part.

    Args:
      programs: programs by name; one is "ours".
      parts: timed parts of each call.
      rounds: number of timed calls of each program. The first, untimed call is checked.
      dtype: dtype of matrix products, which sets the tolerance of that check.

    Raises:
      RuntimeError: if outputs do not agree, or a program fails.
    """
    check = functools.partial(check_agreement, tolerance=TOLERANCES[dtype])
    # The first calls compile. They are checked before anything is timed.
    calls = results_interleaved(dict(programs), rounds=rounds, limit=COMPILE_SECONDS, check=check)
    return [_speed(part, side, calls) for part in parts for side in calls]


def _speed(part: Part, side: str, calls: Mapping[str, Sequence[Call]]) -> PairedSpeed:
    seconds, ours = (np.array([call.seconds[part.name] for call in calls[name]]) for name in (side, OURS))
    # Both calls of a round are seconds apart: a slow period of the machine affects both.
    ratios = tuple((seconds / ours).tolist())
    # The median, because one slow round must not decide, and neither must one fast one.
    speed = part.num_tokens / float(np.median(seconds))
    return PairedSpeed(part.work, side, speed, part.bound, ratios, calls[side][0].setting)


def check_agreement(calls: Mapping[str, Any], *, tolerance: Tolerance = TOLERANCES["float32"]) -> None:
    """Checks that the outputs of all programs are ours within a tolerance.

    Texts that may differ are compared up to their first difference. There each side has its own most likely
    token, whose log-probabilities differ by no more than others if rounding decided between them.

    Raises:
      RuntimeError: if outputs of a program differ by more.
    """
    ours = calls[OURS].outputs
    for side, call in calls.items():
        names = list(ours)
        is_compared: Any = ...
        # After a different token the contexts differ, and so may everything.
        if TOKENS in ours and not tolerance.equal_texts:
            names.remove(TOKENS)
            is_compared = _has_equal_context(ours[TOKENS], call.outputs[TOKENS])
        for name in names:
            # Tokens are whole numbers: a different one exceeds both tolerances.
            differences = np.abs(np.asarray(call.outputs[name]) - ours[name])[is_compared]
            # Not "greater", because NaN is no agreement.
            most = np.quantile(differences, 1 - tolerance.tie_share, method="higher")
            if not (most <= tolerance.usual and np.max(differences) <= tolerance.tie):
                raise RuntimeError(f'{name} of "{side}" differ from ours by {np.max(differences):.2g}')


def _has_equal_context(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """Returns for each token of two arrays [batch, new] whether all tokens before it are equal."""
    # A token that differs has an equal context itself, hence the shift by one.
    differs = np.cumsum(ours != theirs, axis=1) > 0
    return ~np.roll(differs, 1, axis=1) | (np.arange(ours.shape[1]) == 0)
