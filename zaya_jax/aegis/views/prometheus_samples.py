"""Prometheus metrics of a run, read from the files that the run writes.

Names follow [Prometheus-naming]: base units, and `_total` for counters. Times of last events are Unix times
instead of ages, because a metrics file may be scraped long after it is written. Values that a restart takes
back, such as the step and the number of skipped steps, are gauges.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from zaya_jax.aegis.agent.sightings import read_sightings
from zaya_jax.aegis.supervisor.restart_policy import ACTIONS
from zaya_jax.aegis.views.goodput import AttemptRecord, find_attempts, measure
from zaya_jax.checkpoint import all_steps, read_config, step_written
from zaya_jax.run_folder.names import CAUGHT_UP, DAMAGED, DECIDED, ENDS, SKIPPED, SPIKED, STARVED, STRAGGLING
from zaya_jax.run_folder.stragglers import active_stragglers
from zaya_jax.run_folder.tail import TailedEvents, newest_rows

KILLED = "killed"
"""Label of attempts whose processes ended without an event."""
KNOWN_EVENTS = SPIKED, STARVED, SKIPPED, DAMAGED, STRAGGLING, CAUGHT_UP, *ENDS
MAX_VALUES = 100
"""Maximum number of values of a label whose values come from files: Prometheus stores a series for each."""
MAX_PAIRS = 1000
"""Maximum number of pairs of labels of which one is a node: enough for a large cluster."""
MAX_CHARACTERS = 100
"""Maximum length of a label value from files."""


@dataclasses.dataclass(frozen=True)
class MetricSample:
    """One value of a metric.

    Attributes:
      name: name of the metric, a key of `METRICS`.
      value: value; NaN is allowed, as for a loss.
      labels: values of the metric's labels, except for the run.
    """

    name: str
    value: float
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunMetric:
    """Description of a metric.

    Attributes:
      meaning: help text of the metric, one sentence.
      labels: names of its labels, in addition to the run.
    """

    meaning: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, RunMetric] = {
    "zaya_readable": RunMetric("1 if this part of the files of a run could be read, else 0.", ("part",)),
    "zaya_step": RunMetric("Last completed step of the run."),
    "zaya_planned_steps": RunMetric("Configured number of steps."),
    "zaya_loss_nats": RunMetric("Cross-entropy per token.", ("split",)),
    "zaya_bits_per_byte": RunMetric("Cross-entropy per byte of text.", ("split",)),
    "zaya_learning_rate": RunMetric("Learning rate of the newest logged step."),
    "zaya_tokens": RunMetric("Number of tokens that the run has read."),
    "zaya_tokens_per_second": RunMetric("Tokens per second between the two newest logged steps."),
    "zaya_model_flops_utilisation_ratio": RunMetric("Model FLOPs divided by the peak FLOPs of the devices."),
    "zaya_gradient_norm": RunMetric("Norm of the gradient before clipping."),
    "zaya_skipped_steps": RunMetric("Steps skipped because of values that were not finite."),
    "zaya_dead_experts": RunMetric("Experts without tokens in the newest logged step, in all layers."),
    "zaya_largest_expert_load_ratio": RunMetric(
        "Tokens of the expert with the most tokens, divided by an even share."
    ),
    "zaya_smallest_expert_load_ratio": RunMetric(
        "Tokens of the expert with the fewest tokens, divided by an even share."
    ),
    "zaya_goodput_ratio": RunMetric("Time of steps that are part of the run, divided by its total time."),
    "zaya_time_seconds": RunMetric("Time of the run by bucket.", ("bucket",)),
    "zaya_running": RunMetric("1 until the run records its end, then 0."),
    "zaya_attempts_total": RunMetric("Number of attempts."),
    "zaya_ends_total": RunMetric("Number of attempts that ended, by kind of end.", ("end",)),
    "zaya_lost_steps_total": RunMetric("Number of steps that were repeated later."),
    "zaya_last_word_timestamp_seconds": RunMetric("Unix time of the last progress report."),
    "zaya_events_total": RunMetric("Number of events.", ("event",)),
    "zaya_decisions_total": RunMetric("Number of decisions after failures.", ("action",)),
    "zaya_node_decisions_total": RunMetric(
        "Number of decisions by the nodes that they exclude.", ("action", "node")
    ),
    "zaya_sightings_total": RunMetric("Number of sightings that agents recorded.", ("class", "host")),
    "zaya_straggler_ratio": RunMetric(
        "Time that a straggler loses, divided by that of a step; absent without stragglers.",
        ("process", "host", "device", "section"),
    ),
    "zaya_checkpoint_step": RunMetric("Step of the newest checkpoint."),
    "zaya_checkpoint_timestamp_seconds": RunMetric("Unix time at which the newest checkpoint was written."),
    "zaya_checkpoint_interval_steps": RunMetric(
        "Steps between two checkpoints, if steps decide when to save."
    ),
    "zaya_checkpoint_interval_seconds": RunMetric(
        "Time between two checkpoints, if time decides when to save."
    ),
}
"""Descriptions of all metrics, by name."""
OF_TRAINING = {
    "step": "zaya_step",
    "learning_rate": "zaya_learning_rate",
    "tokens": "zaya_tokens",
    "tokens_per_second": "zaya_tokens_per_second",
    "model_flops_utilisation": "zaya_model_flops_utilisation_ratio",
    "gradient_norm": "zaya_gradient_norm",
    "skipped_steps": "zaya_skipped_steps",
    "dead_experts": "zaya_dead_experts",
    "largest_load": "zaya_largest_expert_load_ratio",
    "smallest_load": "zaya_smallest_expert_load_ratio",
}
"""Metrics of training steps, by their names in the rows of a run's metrics file."""
OF_BOTH_SPLITS = {"loss": "zaya_loss_nats", "bits_per_byte": "zaya_bits_per_byte"}


class WatchedRun:
    """A run whose files are read at each scrape.

    Args:
      run_folder: folder of the run, which may not exist yet.
    """

    def __init__(self, run_folder: pathlib.Path):
        self._folder = run_folder
        self._events = TailedEvents(run_folder)

    def samples(self) -> list[MetricSample]:
        """Returns the current samples of the run, and which parts of its files could be read."""
        parts: dict[str, Callable[[], Iterator[MetricSample]]] = {
            "metrics": lambda: _of_rows(newest_rows(self._folder)),
            "events": self._of_events,
            "config": self._of_config,
            "checkpoints": self._of_checkpoints,
            "sightings": self._of_sightings,
        }
        return [sample for part, read in parts.items() for sample in _tried(part, read)]

    def _of_events(self) -> Iterator[MetricSample]:
        events = self._events.read()
        yield from _counted("zaya_events_total", "event", self._events.counts, KNOWN_EVENTS)
        yield from _of_decisions([event for event in events if event["event"] == DECIDED])
        yield from _of_stragglers(active_stragglers(events))
        attempts = find_attempts(events)
        yield from _of_attempts(attempts)
        if attempts:
            goodput = measure(events)
            yield MetricSample("zaya_goodput_ratio", goodput.share)
            yield MetricSample("zaya_lost_steps_total", float(goodput.lost_steps))
            for bucket, seconds in goodput.seconds.items():
                yield MetricSample("zaya_time_seconds", seconds, {"bucket": bucket})

    def _of_config(self) -> Iterator[MetricSample]:
        train = read_config(self._folder).train
        yield MetricSample("zaya_planned_steps", float(train.num_steps))
        # Checkpoints are due either by steps or by minutes, never by both.
        if train.checkpoint_minutes is None:
            yield MetricSample("zaya_checkpoint_interval_steps", float(train.checkpoint_every))
        else:
            yield MetricSample("zaya_checkpoint_interval_seconds", 60 * train.checkpoint_minutes)

    def _of_checkpoints(self) -> Iterator[MetricSample]:
        # Names and times of folders are enough: no checkpoint is opened at a scrape.
        steps = all_steps(self._folder)
        if steps:
            yield MetricSample("zaya_checkpoint_step", float(steps[-1]))
            written = step_written(self._folder, steps[-1]).timestamp()
            yield MetricSample("zaya_checkpoint_timestamp_seconds", written)

    def _of_sightings(self) -> Iterator[MetricSample]:
        pairs = ((each.name, each.host) for each in read_sightings(self._folder))
        yield from _paired("zaya_sightings_total", ("class", "host"), pairs)


def _tried(part: str, read: Callable[[], Iterator[MetricSample]]) -> list[MetricSample]:
    # A file that is damaged, or is being replaced by the run, must not hide the other parts.
    try:
        samples = list(read())
    except (OSError, ValueError):
        return [MetricSample("zaya_readable", 0.0, {"part": part})]
    return [*samples, MetricSample("zaya_readable", 1.0, {"part": part})]


def _of_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[MetricSample]:
    for split, row in rows.items():
        for field, name in OF_BOTH_SPLITS.items():
            yield from _of_field(row, field, name, {"split": split})
    trained = rows.get("train", {})
    for field, name in OF_TRAINING.items():
        yield from _of_field(trained, field, name, {})


def _of_field(
    row: Mapping[str, Any], field: str, name: str, labels: Mapping[str, str]
) -> Iterator[MetricSample]:
    # NaN is exported: a loss that is not finite is exactly what alerts look for.
    if isinstance(value := row.get(field), int | float):
        yield MetricSample(name, float(value), labels)


def _of_attempts(attempts: list[AttemptRecord]) -> Iterator[MetricSample]:
    yield MetricSample("zaya_attempts_total", float(len(attempts)))
    ends = collections.Counter(attempt.end or KILLED for attempt in attempts[:-1])
    if attempts:
        newest = attempts[-1]
        yield MetricSample("zaya_running", float(newest.end is None))
        yield MetricSample("zaya_last_word_timestamp_seconds", newest.ended)
        # An attempt without an end may still be running, until the next one begins.
        if newest.end is not None:
            ends[newest.end] += 1
    yield from _counted("zaya_ends_total", "end", ends, (*ENDS, KILLED))


def _of_decisions(decisions: list[dict[str, Any]]) -> Iterator[MetricSample]:
    # Decisions of a dry run were not carried out.
    actions = [(str(event.get("action")), event) for event in decisions if event.get("acted", True)]
    counts = collections.Counter(action for action, _ in actions)
    yield from _counted("zaya_decisions_total", "action", counts, ACTIONS)
    nodes = ((action, str(node)) for action, event in actions for node in _list(event.get("nodes")))
    yield from _paired("zaya_node_decisions_total", ("action", "node"), nodes)


def _of_stragglers(stragglers: list[Mapping[str, Any]]) -> Iterator[MetricSample]:
    name = "zaya_straggler_ratio"
    for event in stragglers[:MAX_VALUES]:
        # An empty device: the process is slow, and none of its devices.
        values = {label: event.get(label) for label in METRICS[name].labels}
        labels = {label: "" if v is None else _label_value(str(v)) for label, v in values.items()}
        yield from _of_field(event, "share", name, labels)


def _paired(name: str, labels: tuple[str, str], pairs: Iterable[tuple[str, str]]) -> Iterator[MetricSample]:
    counts = collections.Counter((_label_value(first), _label_value(second)) for first, second in pairs)
    for values, number in counts.most_common(MAX_PAIRS):
        yield MetricSample(name, float(number), dict(zip(labels, values, strict=True)))


def _counted(
    name: str, label: str, counts: Mapping[str, int], known: tuple[str, ...]
) -> Iterator[MetricSample]:
    """Yields counters by a label. Known values are present from the first scrape, with 0.

    To Prometheus a series that begins at 1 has not increased, so that no alert would fire.
    """
    by_value = collections.Counter[str]()
    for value, number in (dict.fromkeys(known, 0) | dict(counts)).items():
        by_value[_label_value(value)] += number
    # Known values first, and then the most frequent ones: these stay if there are too many.
    ranked = sorted(by_value.items(), key=lambda item: (item[0] not in known, -item[1]))
    for value, number in ranked[:MAX_VALUES]:
        yield MetricSample(name, float(number), {label: value})


def _label_value(value: str) -> str:
    return value[:MAX_CHARACTERS]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
