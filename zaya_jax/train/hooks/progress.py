"""The progress line of a run: live on a terminal, plain lines elsewhere."""

import collections
import contextlib
import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

import jax
from rich.cells import cell_len
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text

from zaya_jax.progress import every, is_live, new_console
from zaya_jax.train.metrics.files import bits_per_byte, text_loss

Batch = TypeVar("Batch")

QUIET_SECONDS = 15
"""Interval without output after which a log gets a line about the current activity; four times as long during
steps."""
BAR_WIDTH = 6
"""Width of the bar in characters. At 80 columns it leaves space for the step count and the activity."""
POLL_SECONDS = 0.002
"""Interval of polls for the completion of a step, short compared with the steps between two lines."""
VALIDATION_STYLE = "bold green"


class ProgressLine:
    """Prints a line for each logged step, and on a terminal a live line below.

    The live line counts the steps that devices have completed, without waiting for any.

    Args:
      num_steps: number of steps of the whole run.
      first_step: number of completed steps.
      console: console to write to; standard output by default.
    """

    def __init__(self, num_steps: int, first_step: int, console: Console | None = None):
        self._console = console or new_console()
        self._num_steps = num_steps
        self._last_line = time.monotonic()
        self._pace = _Pace(num_steps, first_step)
        self._losses = _Losses()
        self._completed = _CompletedSteps(first_step)
        self._phase = ""
        self._status = _Status()
        self._entered = contextlib.ExitStack()
        self._live = None
        if is_live(self._console):
            # Four times a second: a line that a terminal over a network keeps up with.
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)

    def __enter__(self) -> "ProgressLine":
        self._entered.enter_context(self._live or every(1.0, self._say_if_quiet))
        return self

    def __exit__(self, *exception: Any) -> None:
        self._entered.__exit__(*exception)

    @property
    def completed(self) -> int:
        """Last step that the devices have completed; the host may be many steps ahead."""
        step = self._completed.count()
        self._pace.look(step)
        return step

    def _where(self) -> str:
        """Describes the last completed step and the current activity."""
        parts = f"step {self.completed}/{self._num_steps}", self._phase, self._status.describe()
        return " | ".join(filter(None, parts))

    def _render(self) -> Table:
        where = self._where()
        shrinking = Column(no_wrap=True, overflow="ellipsis")
        grid = Table.grid(Column(no_wrap=True), shrinking, Column(no_wrap=True), padding=(0, 1, 0, 0))
        left = Text(f"{self._pace.left() or '--:--'} left", style="progress.remaining")
        # Counted at each refresh, because the host is many steps ahead of the devices.
        bar = ProgressBar(total=self._num_steps, completed=self._completed.count(), width=BAR_WIDTH)
        grid.add_row(bar, Text(where), left)
        return grid

    def _say_if_quiet(self) -> None:
        # In another thread, because the main thread may be in one call for minutes, such as a compilation.
        limit = QUIET_SECONDS if self._status.describe() else 4 * QUIET_SECONDS
        if time.monotonic() - self._last_line >= limit:
            self.say(self._where())

    def say(self, text: str, *, style: str | None = None) -> None:
        """Prints a line above the live line.

        Args:
          text: text of the line.
          style: name of a rich style, which applies on a terminal.
        """
        # No markup, because a folder's name may contain brackets.
        self._console.print(Text(text), style=Style.parse(style) if style else None, markup=False)
        self._last_line = time.monotonic()

    def compiling(self) -> None:
        """Records that the next step compiles, so that earlier steps do not predict the remaining time."""
        self._status.begin("compiling the step")
        self._pace.forget(until=self._completed.begun)

    def add(self, loss: Any, num_targets: Any, preferences: Mapping[str, Any] | None = None) -> None:
        """Adds a step's loss to the mean of the next line, without waiting for it.

        Args:
          loss: mean loss per target in nats; it may still be computed on its device.
          num_targets: number of targets, likewise.
          preferences: means of preference metrics by name, likewise.
        """
        # Not converted to float, which would wait for the step, so that the device would wait for the host.
        self._losses.add(loss, num_targets, preferences or {})
        self._completed.add(loss)
        self._status.end()

    def update(
        self, step: int, values: dict[str, float], phase: str = "", *, num_bytes: Sequence[float] = ()
    ) -> None:
        """Prints the metrics of a step.

        The loss is the mean of the steps with a finite loss since the last line, because single losses are
        noisy.

        Args:
          step: number of the step, which is complete.
          values: metrics of the step by name.
          phase: name of the phase, or "".
          num_bytes: bytes of text of each step since the last line.
        """
        # The step is complete, because its metrics are on the host.
        self._completed.reach(step)
        # Before the line, which shows the remaining time after this step.
        self._pace.look(step)
        self._phase = phase
        self._status.end()
        left = self._pace.left()
        texts = describe(step, self._num_steps, values | self._losses.take(num_bytes), phase)
        texts = [f"{text} | {left} left" if left else text for text in texts]
        # A log has everything on one line. On a terminal the less important values are dropped.
        fitting = (text for text in texts if not self._live or cell_len(text) <= self._console.width)
        self.say(next(fitting, texts[-1]))

    def wait_for(self, loss: Any) -> None:
        """Waits until a step is complete. Unlike in a transfer, Python handles signals meanwhile.

        Args:
          loss: loss of the step, on its device.
        """
        while not _is_ready(loss):
            time.sleep(POLL_SECONDS)

    def stopping(self, step: int) -> None:
        """Prints at which step a run will stop, and how many steps are complete.

        Args:
          step: last dispatched step, which will be saved.
        """
        self.say(f"stopping: {self.completed} steps are complete; finishing and saving step {step}")

    def validated(self, step: int, text: str) -> None:
        """Prints the held-out loss of a step in another style than training lines.

        Args:
          step: number of the step.
          text: description of the results.
        """
        self.say(f"held-out at step {step}/{self._num_steps} | {text}", style=VALIDATION_STYLE)

    @contextlib.contextmanager
    def pausing(self, what: str = "saving a checkpoint") -> Iterator[None]:
        """Excludes the time of a block from the remaining time, which is estimated from steps.

        Args:
          what: description of the activity.
        """
        self._status.begin(what)
        with self._pace.paused():
            yield
        self._status.end()

    def evaluating(self, step: int, batches: Iterable[Batch], num_batches: int) -> Iterator[Batch]:
        """Yields the batches of an evaluation, and shows how many are done."""
        what = f"held-out batch {{}}/{num_batches}"
        with self.pausing(what.format(0)):
            for done, batch in enumerate(batches):
                self._status.relabel(what.format(done))
                if not self._live and time.monotonic() - self._last_line >= QUIET_SECONDS:
                    self.say(f"step {step}: {what.format(done)}")
                yield batch


class _Status:
    """The current activity other than steps, and its duration."""

    def __init__(self):
        self._what, self._begun = "", 0.0

    def begin(self, what: str) -> None:
        """Starts an activity."""
        self._what, self._begun = what, time.monotonic()

    def relabel(self, what: str) -> None:
        """Changes the description of the current activity."""
        self._what = what

    def end(self) -> None:
        """Ends the activity: the run is at its steps again."""
        self._what = ""

    def describe(self) -> str:
        """Describes the activity and its duration; "" during steps."""
        what = self._what  # read once, because another thread may end it meanwhile
        return f"{what}, {time.monotonic() - self._begun:.0f} s" if what else ""


class _CompletedSteps:
    """Counts the steps that devices have completed. Two threads use it: the display's and the loop's.

    Args:
      step: number of completed steps.
    """

    def __init__(self, step: int):
        self._step = self.begun = step
        self._losses: collections.deque[Any] = collections.deque()
        self._lock = threading.Lock()

    def add(self, loss: Any) -> None:
        """Adds a dispatched step by its future loss."""
        with self._lock:
            self._losses.append(loss)
            self.begun += 1

    def reach(self, step: int) -> None:
        """Records that a step is complete."""
        with self._lock:
            while self._losses and self._step < step:
                self._losses.popleft()
                self._step += 1
            self._step = max(self._step, step)
            self.begun = max(self.begun, step)

    def count(self) -> int:
        """Returns the last completed step, without waiting: arrays report whether they are computed."""
        with self._lock:
            # In order: a step does not count before all earlier ones are complete.
            while self._losses and _is_ready(self._losses[0]):
                self._losses.popleft()
                self._step += 1
            return self._step


def _is_ready(loss: Any) -> bool:
    return not isinstance(loss, jax.Array) or cast(Any, loss).is_ready()  # missing in the stubs of jax


class _Pace:
    """Estimates the end of a run from its steps since the last one that compiled.

    Evaluations and checkpoints are excluded, because the first of each compiles a program too.
    """

    def __init__(self, num_steps: int, first_step: int):
        self._num_steps = num_steps
        self._begin: tuple[int, float] | None = None
        self._end: float | None = None
        self._last = first_step
        self._is_paused = False

    def forget(self, *, until: int) -> None:
        """Discards the steps up to this one; the next one compiles."""
        self._begin = self._end = None
        self._last = until

    def look(self, step: int) -> None:
        """Records the time at which a step was completed, if it is new."""
        # The display's thread calls it too, between two steps and during evaluations.
        if step <= self._last or self._is_paused:
            return
        now, self._last = time.monotonic(), step
        if self._begin is None:  # the step that compiled: time counts from its end
            self._begin = step, now
            return
        first, since = self._begin
        self._end = now + (now - since) / (step - first) * (self._num_steps - step)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Excludes the time of a block, during which there is no estimate."""
        begin, end, start = self._begin, self._end, time.monotonic()
        self._end, self._is_paused = None, True
        yield
        took, self._is_paused = time.monotonic() - start, False
        # Both times move by the duration of the pause.
        self._begin = begin and (begin[0], begin[1] + took)
        self._end = None if end is None else end + took

    def left(self) -> str | None:
        """Returns the remaining time; None while it is unknown."""
        return None if self._end is None else format_duration(max(self._end - time.monotonic(), 0.0))


class _Losses:
    """Losses of the steps since the last line, which stay on their devices until they are needed."""

    def __init__(self):
        self._steps: list[tuple[Any, Any, Mapping[str, Any]]] = []

    def add(self, loss: Any, num_targets: Any, preferences: Mapping[str, Any]) -> None:
        self._steps.append((loss, num_targets, preferences))

    def take(self, num_bytes: Sequence[float]) -> dict[str, float]:
        """Returns means over all targets, and the loss in bits per byte; {} without finite steps."""
        # One transfer for all steps.
        steps, self._steps = jax.device_get(self._steps), []
        # Without non-finite losses, whose number the line shows.
        counted = [
            ({"loss": float(loss), **preferences}, float(num_targets), text)
            for (loss, num_targets, preferences), text in zip(steps, num_bytes, strict=True)
            if math.isfinite(loss)
        ]
        if not counted:
            return {}
        # Weighted by targets, because packed batches have unequal numbers of them.
        sums = {
            name: sum(float(means[name]) * num_targets for means, num_targets, _ in counted)
            for name in counted[0][0]
        }
        num_targets, text_bytes = sum(step[1] for step in counted), sum(step[2] for step in counted)
        # The other sums are preference metrics, which determine the loss of the text.
        loss = sums.pop("loss")
        means = {name: value / max(num_targets, 1) for name, value in {"loss": loss, **sums}.items()}
        return means | {"bits_per_byte": bits_per_byte(text_loss(loss, sums), text_bytes)}


def describe(step: int, num_steps: int, values: dict[str, float], phase: str = "") -> list[str]:
    """Returns a line with the metrics of a step, then shorter ones without load entropy and phase."""
    utilization = values.get("model_flops_utilisation")
    skipped = round(values.get("skipped_steps", 0))
    accuracy = values.get("rewards/accuracies")
    parts = (
        (0, f"step {step}/{num_steps}"),
        (1, phase),  # an earlier line has announced it
        (0, f"loss {values['loss']:.4f}"),
        (0, f"skipped steps {skipped:,}" if skipped else ""),  # since the start of the run
        (0, "" if accuracy is None else f"accuracy {accuracy:.1%}"),
        (0, f"{values['bits_per_byte']:.3f} bits/byte"),
        (0, f"{values['tokens_per_second']:,.0f} tokens/s"),
        (0, "" if utilization is None else f"MFU {utilization:.1%}"),
        (2, f"load entropy {values['load_entropy']:.4f}"),
    )
    return [" | ".join(text for rank, text in parts if text and rank <= lowest) for lowest in (2, 1, 0)]


def format_duration(seconds: float) -> str:
    """Formats a duration as 1:02:03 or 2:03."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
