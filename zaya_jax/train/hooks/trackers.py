"""Experiment trackers: Weights & Biases and trackio, where the config enables them.

The run's own record is `metrics.jsonl`. A tracker that fails is reported once and disabled.
"""

import contextlib
import dataclasses
import importlib.util
import json
import pathlib
import sys
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from zaya_jax.config import Config
from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.parallel.processes import hosts
from zaya_jax.platform.shell import install_command
from zaya_jax.run_folder.names import METRICS_FILE, TASKS, TRACKERS_FILE, TRAIN, VALIDATION
from zaya_jax.train.heartbeats import Heartbeats
from zaya_jax.train.hooks.hook import Hook, StepContext
from zaya_jax.train.metrics.files import as_code, read_metrics
from zaya_jax.train.setup import PreparedRun

PROMPT_SECONDS = 30
"""At a terminal wandb asks for a key; without an answer training starts all the same."""
FINISH_SECONDS = 120
"""Time for wandb to send the rest: without a network it would retry for ever, and a run would not end."""


class Tracker(Protocol):
    """Interface of an experiment tracker."""

    def __init__(self, config: Config, run_id: str): ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of a step by name; steps never decrease."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Logs a text at a step."""

    def close(self, *, failed: bool) -> None:
        """Sends what is left, and records whether the run failed."""


class WandbTracker:
    """A run of Weights & Biases; offline it is stored in the run folder, for `wandb sync`."""

    def __init__(self, config: Config, run_id: str):
        import wandb  # pyright: ignore[reportMissingImports]  # seconds of imports, and optional

        self._wandb = wandb
        self._run = wandb.init(
            project=config.log.project,
            name=_name(config),
            id=run_id,
            resume="allow",
            # None leaves it to WANDB_MODE, with which users turn it off on a machine without a network.
            mode="offline" if config.log.wandb == "offline" else None,
            dir=config.run_folder,
            config=dataclasses.asdict(config),
            # A run may be resumed with other fields of its config.
            allow_val_change=True,
            # Its copy of the terminal would have every state of the progress line.
            settings=wandb.Settings(
                console="off", login_timeout=PROMPT_SECONDS, finish_timeout=FINISH_SECONDS
            ),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs values at the run's own step."""
        self._run.log(dict(values), step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        """Logs a table of one row: wandb has no plain text."""
        self._run.log({tag: self._wandb.Table(columns=["step", "text"], data=[[step, text]])}, step=step)

    def close(self, *, failed: bool) -> None:
        """Ends the run there, with an exit code for failed ones."""
        self._run.finish(exit_code=int(failed))


class TrackioTracker:
    """A run of trackio, which stores runs in SQLite on this machine (TRACKIO_DIR)."""

    def __init__(self, config: Config, run_id: str):
        import trackio  # pyright: ignore[reportMissingImports]  # seconds of imports, and optional

        self._trackio = trackio
        # trackio identifies runs by name alone: another folder of this name would continue the same run.
        self._run = trackio.init(
            project=config.log.project,
            name=f"{_name(config)}-{run_id}",
            config=dataclasses.asdict(config),
            resume="allow",
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs values at the run's own step."""
        self._run.log(dict(values), step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        """Logs a text in a Markdown code block."""
        self._run.log({tag: self._trackio.Markdown(as_code(text))}, step=step)

    def close(self, *, failed: bool) -> None:
        """Writes buffered values."""
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {"wandb": WandbTracker, "trackio": TrackioTracker}
"""By the names of their packages, which are also the fields of `log` that enable them."""


@dataclasses.dataclass
class _Progress:
    """What a tracker has of our run.

    Attributes:
      run_id: id of the run in the tracker.
      step: last step that it received.
      kinds: kinds of values that it received of this step.
    """

    run_id: str
    step: int = 0
    kinds: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "_Progress":
        return cls(values["run_id"], values["step"], tuple(values["kinds"]))

    def is_new(self, step: int, kind: str) -> bool:
        return step > self.step or (step == self.step and kind not in self.kinds)

    def add(self, step: int, *kinds: str) -> None:
        self.kinds = (*(self.kinds if step == self.step else ()), *kinds)
        self.step = step


class Trackers(Hook):
    """The trackers that a config enables, in the first process; in other processes none.

    Each step is sent once. After a kill its values are the same again. After a rollback they differ: the
    trackers keep the first values and continue after that step, because their packages refuse decreasing
    steps. TensorBoard and `metrics.jsonl` have the values of the latest attempt.

    Args:
      config: config of the run.
    """

    def __init__(self, config: Config):
        self._config = config
        # Each process would start its own run there.
        self._names = enabled_trackers(config) if hosts.is_first() else []
        self._open: dict[str, Tracker] = {}
        self._progress: dict[str, _Progress] | None = None
        self._is_started = False

    def on_setup(self, run: PreparedRun, heartbeats: Heartbeats) -> None:
        """Reads what the trackers have received, before rows of steps that run again are removed."""
        self._read_progress()

    def on_start(self, context: StepContext) -> None:
        """Opens the trackers."""
        self.start()

    def on_log(self, context: StepContext, values: Mapping[str, float]) -> None:
        """Sends the values of a training step."""
        self.write(context.step, TRAIN, values)

    def on_evaluate(self, context: StepContext, kind: str, values: Mapping[str, float]) -> None:
        """Sends the results of an evaluation."""
        self.write(context.step, kind, values)

    def on_save(self, context: StepContext) -> None:
        """Records what the trackers have received."""
        self.sync()

    def start(self) -> None:
        """Opens the trackers, once the run has its folder; later calls do nothing."""
        if not self._names or self._is_started:
            return
        self._read_progress()
        self._is_started = True
        for name in self._names:
            with self._surviving(name):
                self._open[name] = TRACKERS[name](self._config, self._progress_of(name).run_id)
        self.sync()

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Sends values of a step; `kind` is "train", "validation" or "tasks"."""
        named = {f"{kind}/{name}": value for name, value in values.items()}
        for name, tracker in list(self._open.items()):
            progress = self._progress_of(name)
            # wandb drops a decreasing step with a warning, trackio draws it a second time.
            if progress.is_new(step, kind):
                with self._surviving(name):
                    tracker.write(step, named)
                progress.add(step, kind)

    def text(self, step: int, tag: str, text: str) -> None:
        """Sends a text that a run generated at its end."""
        self.start()  # a run may have ended between its last step and its sample
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                tracker.text(step, tag, text)

    def sync(self) -> None:
        """Records what the trackers have received, so that a resumed run sends nothing twice."""
        if self._is_started and self._progress is not None:
            values = {name: dataclasses.asdict(progress) for name, progress in self._progress.items()}
            durable.write(self._file, json.dumps(values, indent=2) + "\n")

    def close(self, *, failed: bool = False) -> None:
        """Closes all trackers, also when one of them fails."""
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                tracker.close(failed=failed)
        # After closing: a process that is killed while they send has sent all that its file says.
        if self._open:
            self.sync()
        self._open = {}

    @property
    def _file(self) -> pathlib.Path:
        return pathlib.Path(self._config.run_folder) / TRACKERS_FILE

    def _read_progress(self) -> None:
        if self._names and self._progress is None:
            self._progress = _read_progress(self._file, self._names)

    def _progress_of(self, name: str) -> _Progress:
        assert self._progress is not None, "an open tracker was started"
        return self._progress[name]

    @contextlib.contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Disables a tracker that fails: no server or other package is a reason to end a run."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            # Errors of these packages are pages of advice; their first line says what is wrong.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(
                f"{name} fails and is disabled ({reason}); training continues, and {METRICS_FILE} has all "
                "values",
                file=sys.stderr,
            )


@contextlib.contextmanager
def open_trackers(config: Config) -> Iterator[Trackers]:
    """Yields the trackers of a run, and closes them at the end of the block.

    Raises:
      UserError: if the package of an enabled tracker is not installed.
    """
    # Before the run has a folder or compiles: afterwards a missing package would cost minutes.
    hosts.run_on_first("trackers", lambda: _check_packages(config))
    trackers = Trackers(config)
    try:
        yield trackers
    except BaseException:
        trackers.close(failed=True)
        raise
    trackers.close()


def enabled_trackers(config: Config) -> list[str]:
    """Returns the names of the trackers that a config enables."""
    return [name for name in TRACKERS if getattr(config.log, name) not in (False, "off")]


def _name(config: Config) -> str:
    return config.log.name or pathlib.Path(config.run_folder).resolve().name


def _check_packages(config: Config) -> None:
    for name in enabled_trackers(config):
        if importlib.util.find_spec(name) is None:
            raise UserError(
                f"log.{name} is {getattr(config.log, name)!r}, and the package {name} is not installed: "
                f"{install_command(name)}"
            )


def _read_progress(file: pathlib.Path, names: list[str]) -> dict[str, _Progress]:
    """Reads what trackers have received; a tracker that is new to the run gets a new run id."""
    progress: dict[str, _Progress] = {}
    # Also of trackers that are off now: when they are enabled again, they continue their run.
    if file.is_file():
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # a file that was edited by hand
            values: dict[str, dict[str, Any]] = json.loads(file.read_bytes())
            progress = {name: _Progress.from_json(each) for name, each in values.items()}
    # After a kill there are rows since the last sync, which were sent too.
    rows = _newest_rows(file.parent)
    for name in names:
        if name not in progress:
            progress[name] = _Progress(uuid.uuid4().hex[:8])
        elif rows and rows[0] >= progress[name].step:
            progress[name].add(rows[0], *rows[1])
    return progress


def _newest_rows(run_folder: pathlib.Path) -> tuple[int, list[str]] | None:
    """Returns the last step of a run's metrics, and the kinds of its rows; None without any."""
    if not (run_folder / METRICS_FILE).is_file():
        return None
    kinds = TRAIN, VALIDATION, TASKS
    steps = {kind: [row["step"] for row in read_metrics(run_folder, kind)] for kind in kinds}
    last = max((max(each) for each in steps.values() if each), default=None)
    return None if last is None else (last, [kind for kind, each in steps.items() if last in each])
