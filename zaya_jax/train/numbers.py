"""The numbers of a run that are looked at while it goes on, without waiting for any step."""

import dataclasses
from collections.abc import Iterable
from typing import TypeVar

import jax

from zaya_jax.aegis.numbers import RouterWatch, Spike, SpikeFinder, Starved
from zaya_jax.config import Config, WatchConfig
from zaya_jax.parallel import hosts
from zaya_jax.train.metrics import read_metrics
from zaya_jax.train.passed_over import PassedOver
from zaya_jax.train.skips import SkipCounter, Streak
from zaya_jax.train.step import Metrics

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Findings:
    """What was found in the steps since the last look.

    Attributes:
      skipped: steps that were not finite, but for those that are passed over.
      streak: of skipped steps, so long that the run must end.
      spike: of the loss.
      starved: experts, of the newest step.
    """

    skipped: list[int]
    streak: Streak | None
    spike: Spike | None
    starved: list[Starved]


class NumberWatch:
    """Keeps the metrics of steps as they lie on their devices, and looks at all of them at once.

    Args:
      skips: counts skipped steps.
      config: says what is found.
      passed_over: steps that are skipped by order, which say nothing.
    """

    def __init__(self, skips: SkipCounter, config: WatchConfig, passed_over: PassedOver):
        self._skips, self._config, self._passed_over = skips, config, passed_over
        self._steps: list[tuple[int, Metrics]] = []
        self._routers = RouterWatch(config)
        self.begin_phase(())

    def begin_phase(self, losses: Iterable[float]) -> None:
        """Forgets the losses, for other sequences and another mixture have others.

        Args:
          losses: of the new phase, as far as they are known.
        """
        self._spikes = SpikeFinder(self._config, losses)

    def add(self, step: int, metrics: Metrics) -> None:
        """Takes the metrics of a step."""
        self._steps.append((step, metrics))

    def look(self) -> Findings:
        """Waits for the steps since the last look, and says what was found in them."""
        steps, self._steps = self._steps, []
        # One transfer, of two numbers a step and the newest one's counts.
        numbers = jax.device_get([(metrics.skipped_steps, metrics.loss) for _, metrics in steps])
        skips, streaks, spikes = [], [], []
        for (step, metrics), (skipped, loss) in zip(steps, numbers, strict=True):
            is_ordered = step in self._passed_over
            if skipped > self._skips.skipped_steps and not is_ordered:
                skips.append(step)
            streaks.append(self._skips.add(step, metrics, int(skipped), is_ordered=is_ordered))
            spikes.append(None if is_ordered else self._spikes.add(step, float(loss)))
        # Of a step in several: what is looked for lasts for thousands of them.
        starved = self._routers.add(jax.device_get(steps[-1][1].router_counts_LX)) if steps else []
        return Findings(skips, _first(streaks), _first(spikes), starved)


def recent_losses(config: Config, phase: str, *, until: int) -> list[float]:
    """The losses that a run wrote down of a phase, the newest last; the same in all processes.

    Args:
      config: of the run.
      phase: its name.
      until: the last step that counts.
    """
    # As the first one reads them: two processes that found another spike would part for good.
    return hosts.from_first("losses", hosts.first_does("losses", lambda: _read(config, phase, until)))


def _read(config: Config, phase: str, until: int) -> list[float]:
    rows = read_metrics(config.run_folder, "train") if until else []
    losses = [row.get("loss") for row in rows if row["step"] <= until and row.get("phase", "") == phase]
    return [loss for loss in losses if isinstance(loss, float)][-config.watch.spike_window :]


def _first(found: list[T | None]) -> T | None:
    # Also if later steps were fine: what becomes of a run must not depend on when it looks.
    return next((each for each in found if each is not None), None)
