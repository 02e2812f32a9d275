"""The line that a person watches: live on a terminal, plain elsewhere."""

import contextlib
import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from zaya_jax.train.metrics import bits_per_byte, text_loss

Batch = TypeVar("Batch")

QUIET_SECONDS = 15
"""After so long without a line that stays, an evaluation says where it is."""
BAR_WIDTH = 6
"""Characters. At 80 columns they leave room for the loss and the speed of a run of hundreds of steps."""


class ProgressLine:
    """Shows where a run is.

    Args:
      num_steps: of the whole run.
      first_step: steps already done.
      console: where to write; standard output by default.
    """

    def __init__(self, num_steps: int, first_step: int, console: Console | None = None):
        # Soft-wrapped: in a file or a pipe a line stays one line, which programs can search for.
        self._console = console or Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._num_steps = num_steps
        self._spoke = time.monotonic()
        self._pace = _Pace(num_steps)
        self._losses = _Losses()
        self._texts: Sequence[str] = ("",)  # the same line, ever shorter: the first that fits is shown
        self._bar = None
        if self._console.is_terminal:
            self._bar = Progress(
                BarColumn(BAR_WIDTH, table_column=Column(no_wrap=True)),
                _Told(lambda: _Fitted(self._texts), Column()),  # the one that gives way
                _Told(self._time_left, Column(no_wrap=True)),
                console=self._console,
            )
            self._task = self._bar.add_task("", total=num_steps, completed=first_step)

    def __enter__(self) -> "ProgressLine":
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._bar:
            self._bar.stop()

    def _time_left(self) -> Text:
        return Text(f"{self._pace.left() or '--:--'} left", style="progress.remaining")

    def say(self, text: str) -> None:
        """Prints a line that stays, above the one that moves."""
        self._console.print(text, markup=False)  # a folder's name may have brackets
        self._spoke = time.monotonic()

    def compiling(self) -> None:
        """The next step compiles a program, and those before it say nothing of how long others take."""
        self._texts = ("compiling the step",)
        self._pace.forget()

    def add(self, loss: Any, num_targets: Any, preferences: Mapping[str, Any] | None = None) -> None:
        """Takes a step's loss into the next line's mean, and does not wait for it.

        Args:
          loss: mean over the targets, in nats, which may still be on its device.
          num_targets: that it is a mean of, likewise.
          preferences: other means over them, likewise, where preferences are learned.
        """
        # Kept as it is: a float of it here would wait for the step, and the device then for the host.
        self._losses.add(loss, num_targets, preferences or {})

    def update(
        self, step: int, values: dict[str, float], phase: str = "", *, num_bytes: Sequence[float] = ()
    ) -> None:
        """Shows the metrics of a step.

        The loss is the mean of the steps since the last line whose loss was finite: that of one step jumps
        with its batch.

        Args:
          step: its number.
          values: its metrics.
          phase: its name, if it has one.
          num_bytes: of text that the targets of each step since the last line stand for.
        """
        # The pace first: a line shows what is left behind this step.
        self._pace.look(step)
        self._texts = describe(step, self._num_steps, values | self._losses.take(num_bytes), phase)
        if self._bar:
            self._bar.update(self._task, completed=step)
            return
        left = self._pace.left()
        self.say(f"{self._texts[0]} | {left} left" if left else self._texts[0])

    def pausing(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no step, whose time says nothing of the steps that are left."""
        return self._pace.paused()

    def evaluating(self, step: int, batches: Iterable[Batch], num_batches: int) -> Iterator[Batch]:
        """The batches of an evaluation, and how many are done for those who wait."""
        before = self._texts
        with self.pausing():
            for done, batch in enumerate(batches):
                self._texts = (f"step {step}: held-out batch {done}/{num_batches}",)
                if not self._bar and time.monotonic() - self._spoke >= QUIET_SECONDS:
                    self.say(self._texts[0])
                yield batch
        self._texts = before  # the line of the step that was shown, until the next one


class _Pace:
    """When a run will be over, by its steps since the last one that compiled.

    Evaluations and checkpoints are left out: the first of each compiles a program too.
    """

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._begin: tuple[int, float] | None = None
        self._end: float | None = None

    def forget(self) -> None:
        """The next look is at a step that compiled."""
        self._begin = self._end = None

    def look(self, step: int) -> None:
        """Notes the time at which a step is done."""
        now = time.monotonic()
        if self._begin is None:  # the step that compiled: time is counted from its end
            self._begin = step, now
            return
        first, since = self._begin
        self._end = now + (now - since) / (step - first) * (self._num_steps - step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """While the run does something else than steps nothing is said of its end, and no time counts."""
        begin, end, start = self._begin, self._end, time.monotonic()
        self._end = None
        yield
        took = time.monotonic() - start
        # Both ends move by what the pause took, as if it had not been.
        self._begin = begin and (begin[0], begin[1] + took)
        self._end = None if end is None else end + took

    def left(self) -> str | None:
        """The time to the end; None as long as nobody knows."""
        return None if self._end is None else format_duration(max(self._end - time.monotonic(), 0.0))


class _Losses:
    """Losses of the steps since the last line, left on their device until somebody asks."""

    def __init__(self):
        self._steps: list[tuple[Any, Any, Mapping[str, Any]]] = []

    def add(self, loss: Any, num_targets: Any, preferences: Mapping[str, Any]) -> None:
        self._steps.append((loss, num_targets, preferences))

    def take(self, num_bytes: Sequence[float]) -> dict[str, float]:
        """Their means over all targets, and the text's loss in bits per byte; nothing of no steps."""
        # One transfer for all of them, when a line is due.
        steps, self._steps = jax.device_get(self._steps), []
        # One skipped step would leave a line without a loss; it says how many there were.
        counted = [
            ({"loss": float(loss), **preferences}, float(num_targets), text)
            for (loss, num_targets, preferences), text in zip(steps, num_bytes, strict=True)
            if math.isfinite(loss)
        ]
        if not counted:
            return {}
        # Weighted by targets: packed batches have unequal numbers of them.
        sums = {
            name: sum(float(means[name]) * num_targets for means, num_targets, _ in counted)
            for name in counted[0][0]
        }
        num_targets, text_bytes = sum(step[1] for step in counted), sum(step[2] for step in counted)
        # What is left beside it are means over pairs, by which the text's loss is known.
        loss = sums.pop("loss")
        means = {name: value / max(num_targets, 1) for name, value in {"loss": loss, **sums}.items()}
        return means | {"bits_per_byte": bits_per_byte(text_loss(loss, sums), text_bytes)}


class _Told(ProgressColumn):
    """A column that asks what to show."""

    def __init__(self, tell: Callable[[], RenderableType], table_column: Column):
        super().__init__(table_column)
        self._tell = tell

    def render(self, task: Task) -> RenderableType:
        """What the progress line tells at this moment."""
        return self._tell()


class _Fitted:
    """The first of some texts, the longest first, that the width has room for."""

    def __init__(self, texts: Sequence[str]):
        self._texts = texts

    def _fit(self, width: int) -> str:
        return next((text for text in self._texts if cell_len(text) <= width), self._texts[-1])

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        # One cell is enough: this column gives way to the others.
        return Measurement(1, cell_len(self._fit(options.max_width)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(self._fit(options.max_width), no_wrap=True, overflow="ellipsis")


def describe(step: int, num_steps: int, values: dict[str, float], phase: str = "") -> list[str]:
    """The metrics of a step on one line, then on shorter ones without what matters less."""
    utilisation = values.get("model_flops_utilisation")
    skipped = round(values.get("skipped_steps", 0))
    accuracy = values.get("rewards/accuracies")
    parts = (
        (0, f"step {step}/{num_steps}"),
        (6, phase),  # a line that stays has said it
        (1, f"loss {values['loss']:.4f}"),
        (2, f"skipped steps {skipped:,}" if skipped else ""),  # since the run began
        (2, "" if accuracy is None else f"accuracy {accuracy:.1%}"),
        (3, f"{values['bits_per_byte']:.3f} bits/byte"),
        (4, f"{values['tokens_per_second']:,.0f} tokens/s"),
        (5, "" if utilisation is None else f"MFU {utilisation:.1%}"),
        (7, f"load entropy {values['load_entropy']:.4f}"),
    )
    return [
        " | ".join(text for rank, text in parts if text and rank <= lowest)
        for lowest in range(len(parts) - 1, -1, -1)
    ]


def format_duration(seconds: float) -> str:
    """A duration in words of a clock: 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
