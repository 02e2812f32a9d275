"""What is counted from one line of metrics to the next."""

import time

from zaya_jax.parallel import hosts


class Clock:
    """Seconds a step since the last look, without what evaluation and checkpoints took."""

    def __init__(self, step: int):
        self.restart(step)

    def restart(self, step: int) -> None:
        """Begins anew behind a step."""
        self._step, self._time = step, time.monotonic()

    def lap(self, step: int) -> float:
        """Seconds a step from the last look to this one."""
        seconds = (time.monotonic() - self._time) / (step - self._step)
        self.restart(step)
        return seconds


class TextBytes:
    """Bytes of text that steps' targets stand for; each process counts those of its share."""

    def __init__(self):
        self._by_step: list[float] = []

    def add(self, num_bytes: float) -> None:
        """Counts those of a step."""
        self._by_step.append(num_bytes)

    def take(self) -> list[float]:
        """Those of all processes, for each step since this was last asked."""
        counted, self._by_step = hosts.gather("text bytes", self._by_step), []
        return [sum(of_step) for of_step in zip(*counted, strict=True)]
