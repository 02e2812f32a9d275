"""The line that a person watches: live on a terminal, plain elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

Batch = TypeVar("Batch")

QUIET_SECONDS = 15
"""After so long without a line that stays, an evaluation says where it is."""


class ProgressLine:
    """Shows where a run is.

    Args:
      num_steps: of the whole run.
      first_step: steps already done.
      console: where to write; standard output by default.
    """

    def __init__(self, num_steps: int, first_step: int, console: Console | None = None):
        self._console = console or Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._num_steps = num_steps
        self._first_step = first_step
        self._started = self._spoke = time.monotonic()
        self._bar = None
        if self._console.is_terminal:
            columns = (BarColumn(16), TextColumn("{task.description}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console)
            self._task = self._bar.add_task("compiling the step", total=num_steps, completed=first_step)

    def __enter__(self) -> "ProgressLine":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False)
        self._spoke = time.monotonic()

    def update(self, step: int, values: dict[str, float], phase: str = "") -> None:
        """Shows the metrics of a step, and the name of its phase if it has one."""
        text = describe(step, self._num_steps, values, phase)
        if self._bar:
            self._bar.update(self._task, completed=step, description=text)
            return
        done = step - self._first_step
        left = (time.monotonic() - self._started) / max(done, 1) * (self._num_steps - step)
        self.say(f"{text} | {format_duration(left)} left")

    def evaluating(self, step: int, batches: Iterable[Batch], num_batches: int) -> Iterator[Batch]:
        """The batches of an evaluation, and how many are done for those who wait."""
        before = self._bar.tasks[0].description if self._bar else ""
        for done, batch in enumerate(batches):
            text = f"step {step}: held-out batch {done}/{num_batches}"
            if self._bar:
                self._bar.update(self._task, description=text)
            elif time.monotonic() - self._spoke >= QUIET_SECONDS:
                self.say(text)
            yield batch
        if self._bar:
            self._bar.update(self._task, description=before)


def describe(step: int, num_steps: int, values: dict[str, float], phase: str = "") -> str:
    """The metrics of a step on one line."""
    parts = [
        f"step {step}/{num_steps}",
        *([phase] if phase else []),
        f"loss {values['loss']:.4f}",
        f"{values['bits_per_byte']:.3f} bits/byte",
        f"{values['tokens_per_second']:,.0f} tokens/s",
    ]
    if "model_flops_utilisation" in values:
        parts.append(f"MFU {values['model_flops_utilisation']:.1%}")
    parts.append(f"load entropy {values['load_entropy']:.4f}")
    return " | ".join(parts)


def format_duration(seconds: float) -> str:
    """As 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
