"""Who is told of a run besides its folder: Weights & Biases and trackio, where the config asks for them.

Neither is the run's record, which is `metrics.jsonl`. One that fails is said once and told no more.
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

from zaya_jax import durable
from zaya_jax.aegis.journal import METRICS_FILE, TASKS, TRAIN, VALIDATION
from zaya_jax.config import Config
from zaya_jax.parallel import hosts
from zaya_jax.train.metrics import as_code, read_metrics

SINKS_FILE = "sinks.json"
"""By sink, the run that it has of ours and what that was told last: one that goes on, goes on there too."""
PROMPT_SECONDS = 30
"""At a terminal wandb asks for a key, and without an answer training begins all the same."""
FINISH_SECONDS = 120
"""For wandb to send what is left: without a network it would try for ever, and a run that is done not end."""


class Sink(Protocol):
    """What a package that keeps runs is asked to do."""

    def __init__(self, config: Config, run_id: str): ...

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Takes values of a step, by their names; steps never go back."""

    def text(self, step: int, tag: str, text: str) -> None:
        """Takes a text that belongs to a step."""

    def close(self, *, failed: bool) -> None:
        """Sends what is left, and says how the run ended."""


class WandbSink:
    """A run of Weights & Biases; offline it lies in the run folder, for `wandb sync`."""

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
            # A run may go on with other fields of its config.
            allow_val_change=True,
            # Its copy of the terminal would have each state of a line that moves.
            settings=wandb.Settings(
                console="off", login_timeout=PROMPT_SECONDS, finish_timeout=FINISH_SECONDS
            ),
        )

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Logs values at the run's own step."""
        self._run.log(dict(values), step=step)

    def text(self, step: int, tag: str, text: str) -> None:
        """Logs a table of one row: wandb has no text by itself."""
        self._run.log({tag: self._wandb.Table(columns=["step", "text"], data=[[step, text]])}, step=step)

    def close(self, *, failed: bool) -> None:
        """Ends the run there, as failed where it did."""
        self._run.finish(exit_code=int(failed))


class TrackioSink:
    """A run of trackio, which keeps them in SQLite on this machine (TRACKIO_DIR)."""

    def __init__(self, config: Config, run_id: str):
        import trackio  # pyright: ignore[reportMissingImports]  # seconds of imports, and optional

        self._trackio = trackio
        # It knows runs by their names alone: another folder of this name would go on in the same run.
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
        """Logs a text as it is, in a block of Markdown."""
        self._run.log({tag: self._trackio.Markdown(as_code(text))}, step=step)

    def close(self, *, failed: bool) -> None:
        """Writes what it still holds."""
        self._run.finish()


KINDS: dict[str, type[Sink]] = {"wandb": WandbSink, "trackio": TrackioSink}
"""By the names of their packages, and of the fields of `log` that ask for them."""


@dataclasses.dataclass
class _Told:
    """A run that a sink has of ours: the last step that it was told of, and which kinds of values."""

    run_id: str
    step: int = 0
    kinds: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "_Told":
        """As it was written down."""
        return cls(said["run_id"], said["step"], tuple(said["kinds"]))

    def is_new(self, step: int, kind: str) -> bool:
        """Whether it was told nothing of this or a later step."""
        return step > self.step or (step == self.step and kind not in self.kinds)

    def add(self, step: int, *kinds: str) -> None:
        self.kinds = (*(self.kinds if step == self.step else ()), *kinds)
        self.step = step


class Sinks:
    """The sinks that a config asks for, in the first process; in others none.

    A step is told once. Behind a kill its values are the same again; behind a spike, where they are others,
    the sinks keep what they were told first, and go on where the run passes that step: packages refuse steps
    that go back. TensorBoard and `metrics.jsonl` have the steps as they were made last.

    Args:
      config: of the run.
    """

    def __init__(self, config: Config):
        self._config = config
        # Each process would begin a run of its own there.
        self._wanted = wanted(config) if hosts.is_first() else []
        self._open: dict[str, Sink] = {}
        self._told: dict[str, _Told] | None = None

    def begin(self) -> None:
        """Opens them, when the run has its folder and before an earlier life's metrics are taken back.

        Those that are open stay so.
        """
        if not self._wanted or self._told is not None:
            return
        self._told = _read_told(self._file, self._wanted)
        for name in self._wanted:
            with self._surviving(name):
                self._open[name] = KINDS[name](self._config, self._told[name].run_id)
        self.sync()

    def write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        """Tells of values of a step, "train" or "validation"."""
        named = {f"{kind}/{name}": value for name, value in values.items()}
        for name, sink in list(self._open.items()):
            told = self._told_of(name)
            # wandb drops a step that goes back with a warning, trackio draws it a second time.
            if told.is_new(step, kind):
                with self._surviving(name):
                    sink.write(step, named)
                told.add(step, kind)

    def text(self, step: int, tag: str, text: str) -> None:
        """Tells of a text that a run made at its end."""
        self.begin()  # a run may have ended between its last step and its sample
        for name, sink in list(self._open.items()):
            with self._surviving(name):
                sink.text(step, tag, text)

    def sync(self) -> None:
        """Writes down what they were told: a run that goes on from here tells nothing twice."""
        if self._told is not None:
            values = {name: dataclasses.asdict(told) for name, told in self._told.items()}
            durable.write(self._file, json.dumps(values, indent=2) + "\n")

    def close(self, *, failed: bool = False) -> None:
        """Ends them, each whatever becomes of the others."""
        for name, sink in list(self._open.items()):
            with self._surviving(name):
                sink.close(failed=failed)
        # Behind the sinks: a process that is killed while they send has told all that its file says.
        if self._open:
            self.sync()
        self._open = {}

    @property
    def _file(self) -> pathlib.Path:
        return pathlib.Path(self._config.run_folder) / SINKS_FILE

    def _told_of(self, name: str) -> _Told:
        assert self._told is not None, "a sink that is open was begun"
        return self._told[name]

    @contextlib.contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        """Gives a sink up that fails: no server and no package of others is a reason to end a run."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            # Their errors are pages of advice; a line of them says what is wrong.
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            print(
                f"{name} fails and is told no more ({reason}); the run goes on, and {METRICS_FILE} has all",
                file=sys.stderr,
            )


@contextlib.contextmanager
def open_sinks(config: Config) -> Iterator[Sinks]:
    """The sinks of a run, which end with the block.

    Raises:
      ValueError: for one whose package is not installed here.
    """
    # Before the run has a folder or compiles: afterwards a missing package would cost minutes.
    hosts.first_does("sinks", lambda: _check_packages(config))
    sinks = Sinks(config)
    try:
        yield sinks
    except BaseException:
        sinks.close(failed=True)
        raise
    sinks.close()


def wanted(config: Config) -> list[str]:
    """Names of the sinks that a config asks for."""
    return [name for name in KINDS if getattr(config.log, name) not in (False, "off")]


def _name(config: Config) -> str:
    return config.log.name or pathlib.Path(config.run_folder).resolve().name


def _check_packages(config: Config) -> None:
    for name in wanted(config):
        if importlib.util.find_spec(name) is None:
            raise ValueError(
                f"log.{name} is {getattr(config.log, name)!r}, and the package {name} is not installed; "
                f"pip install 'zaya_jax[{name}]' installs it"
            )


def _read_told(file: pathlib.Path, names: list[str]) -> dict[str, _Told]:
    """What sinks were told before, also of those that are off now; a new run for one that is new."""
    told: dict[str, _Told] = {}
    # Also those that are off: a run that turns one on again goes on in the run that it had there.
    if file.is_file():
        with contextlib.suppress(ValueError, TypeError, AttributeError):  # a file that somebody has edited
            values: dict[str, dict[str, Any]] = json.loads(file.read_bytes())
            told = {name: _Told.from_json(each) for name, each in values.items()}
    # A kill leaves rows behind the last sync, which were told too.
    rows = _newest_rows(file.parent)
    for name in names:
        if name not in told:
            told[name] = _Told(uuid.uuid4().hex[:8])
        elif rows and rows[0] >= told[name].step:
            told[name].add(rows[0], *rows[1])
    return told


def _newest_rows(run_folder: pathlib.Path) -> tuple[int, list[str]] | None:
    """The last step that a run's metrics have, and of which kinds; None without one."""
    if not (run_folder / METRICS_FILE).is_file():
        return None
    kinds = TRAIN, VALIDATION, TASKS
    steps = {kind: [row["step"] for row in read_metrics(run_folder, kind)] for kind in kinds}
    last = max((max(each) for each in steps.values() if each), default=None)
    return None if last is None else (last, [kind for kind, each in steps.items() if last in each])
