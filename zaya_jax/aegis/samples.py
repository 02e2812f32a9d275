"""What Prometheus is told of a run, from the files that the run writes: names, what they mean, and values.

Names follow [Prometheus-naming]: base units, `_total` for what only grows, the Unix time of what was last,
for the age of a file that is scraped later is nobody's. What a restart takes back, such as steps and skipped
ones, is a gauge.
"""

import collections
import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from zaya_jax.aegis.deciding import ACTIONS
from zaya_jax.aegis.following import FollowedEvents, newest_rows
from zaya_jax.aegis.goodput import Life, find_attempts, measure
from zaya_jax.aegis.journal import DAMAGED, DECIDED, ENDS, SKIPPED, SPIKED, STARVED
from zaya_jax.aegis.sightings import read_sightings
from zaya_jax.checkpoint import all_steps, read_config, step_written

KILLED = "killed"
"""The end of a life that said nothing of it."""
KNOWN_EVENTS = SPIKED, STARVED, SKIPPED, DAMAGED, *ENDS
MOST_VALUES = 100
"""Of a label that holds words of others: more would cost whoever keeps them more than they tell."""
MOST_PAIRS = 1000
"""Of labels of which one is a node: a large cluster has that many."""
MOST_CHARACTERS = 100


@dataclasses.dataclass(frozen=True)
class Sample:
    """A value that Prometheus is told.

    Attributes:
      name: one of `METRICS`.
      value: may be NaN, as a loss may.
      labels: those of the metric, but for the run.
    """

    name: str
    value: float
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunMetric:
    """What Prometheus is told under a name.

    Attributes:
      meaning: in a sentence.
      labels: beside the run's.
    """

    meaning: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, RunMetric] = {
    "zaya_readable": RunMetric("1 where this part of a run's files could be read.", ("part",)),
    "zaya_step": RunMetric("Step of the run that was made last."),
    "zaya_planned_steps": RunMetric("Steps that the run is to make."),
    "zaya_loss_nats": RunMetric("Cross-entropy of a token.", ("split",)),
    "zaya_bits_per_byte": RunMetric("Cross-entropy of a byte of text.", ("split",)),
    "zaya_learning_rate": RunMetric("Learning rate of the newest logged step."),
    "zaya_tokens": RunMetric("Tokens that the run has read."),
    "zaya_tokens_per_second": RunMetric("Tokens read a second, between the newest two logged steps."),
    "zaya_model_flops_utilisation_ratio": RunMetric("FLOPs of the model by those that the devices could do."),
    "zaya_gradient_norm": RunMetric("Norm of the gradient before it was clipped."),
    "zaya_skipped_steps": RunMetric("Steps that were not finite, and taught nothing."),
    "zaya_dead_experts": RunMetric("Experts that got no token in the newest logged step, of all layers."),
    "zaya_largest_expert_load_ratio": RunMetric("Tokens of the busiest expert by an even share."),
    "zaya_smallest_expert_load_ratio": RunMetric("Tokens of the idlest expert by an even share."),
    "zaya_goodput_ratio": RunMetric("Time of steps that are part of the run by all of its time."),
    "zaya_time_seconds": RunMetric("What the time of the run went into.", ("bucket",)),
    "zaya_running": RunMetric("1 unless the run has told of its end."),
    "zaya_attempts_total": RunMetric("Lives of the run's processes."),
    "zaya_ends_total": RunMetric("Lives that ended, by how they did.", ("end",)),
    "zaya_lost_steps_total": RunMetric("Steps that were made again later."),
    "zaya_last_word_timestamp_seconds": RunMetric("Unix time at which the processes said where they are."),
    "zaya_events_total": RunMetric("What was written down of the run.", ("event",)),
    "zaya_decisions_total": RunMetric("What was done about failures.", ("action",)),
    "zaya_node_decisions_total": RunMetric("The same by the nodes that it was done to.", ("action", "node")),
    "zaya_sightings_total": RunMetric("What agents saw of nodes.", ("class", "host")),
    "zaya_checkpoint_step": RunMetric("Step of the newest checkpoint."),
    "zaya_checkpoint_timestamp_seconds": RunMetric("Unix time at which it was written."),
    "zaya_checkpoint_interval_steps": RunMetric("Steps between two checkpoints, where they say when."),
    "zaya_checkpoint_interval_seconds": RunMetric("Time between two checkpoints, where it says when."),
}
"""All names, and what they mean."""
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
"""By their names in the rows of a run's metrics."""
OF_BOTH_SPLITS = {"loss": "zaya_loss_nats", "bits_per_byte": "zaya_bits_per_byte"}


class WatchedRun:
    """A run whose files are read again and again.

    Args:
      run_folder: of the run, which need not have begun.
    """

    def __init__(self, run_folder: pathlib.Path):
        self._folder = run_folder
        self._events = FollowedEvents(run_folder)

    def samples(self) -> list[Sample]:
        """All that can be told of the run now; what cannot be read is told as such."""
        parts: dict[str, Callable[[], Iterator[Sample]]] = {
            "metrics": lambda: _of_rows(newest_rows(self._folder)),
            "events": self._of_events,
            "config": self._of_config,
            "checkpoints": self._of_checkpoints,
            "sightings": self._of_sightings,
        }
        return [sample for part, read in parts.items() for sample in _tried(part, read)]

    def _of_events(self) -> Iterator[Sample]:
        events = self._events.look()
        yield from _counted("zaya_events_total", "event", self._events.counts, KNOWN_EVENTS)
        yield from _of_decisions([event for event in events if event["event"] == DECIDED])
        attempts = find_attempts(events)
        yield from _of_attempts(attempts)
        if attempts:
            found = measure(events)
            yield Sample("zaya_goodput_ratio", found.share)
            yield Sample("zaya_lost_steps_total", float(found.lost_steps))
            for bucket, seconds in found.seconds.items():
                yield Sample("zaya_time_seconds", seconds, {"bucket": bucket})

    def _of_config(self) -> Iterator[Sample]:
        train = read_config(self._folder).train
        yield Sample("zaya_planned_steps", float(train.num_steps))
        # A step says when, unless the clock does.
        if train.checkpoint_minutes is None:
            yield Sample("zaya_checkpoint_interval_steps", float(train.checkpoint_every))
        else:
            yield Sample("zaya_checkpoint_interval_seconds", 60 * train.checkpoint_minutes)

    def _of_checkpoints(self) -> Iterator[Sample]:
        steps = all_steps(self._folder)
        if steps:
            yield Sample("zaya_checkpoint_step", float(steps[-1]))
            written = step_written(self._folder, steps[-1]).timestamp()
            yield Sample("zaya_checkpoint_timestamp_seconds", written)

    def _of_sightings(self) -> Iterator[Sample]:
        seen = ((each.name, each.host) for each in read_sightings(self._folder))
        yield from _paired("zaya_sightings_total", ("class", "host"), seen)


def _tried(part: str, read: Callable[[], Iterator[Sample]]) -> list[Sample]:
    # A file that is damaged, or that a run replaces just now, takes no other part with it.
    try:
        found = list(read())
    except (OSError, ValueError):
        return [Sample("zaya_readable", 0.0, {"part": part})]
    return [*found, Sample("zaya_readable", 1.0, {"part": part})]


def _of_rows(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[Sample]:
    for split, row in rows.items():
        for field, name in OF_BOTH_SPLITS.items():
            yield from _of_field(row, field, name, {"split": split})
    trained = rows.get("train", {})
    for field, name in OF_TRAINING.items():
        yield from _of_field(trained, field, name, {})


def _of_field(row: Mapping[str, Any], field: str, name: str, labels: Mapping[str, str]) -> Iterator[Sample]:
    # NaN as it is: a loss that is none is what one looks for.
    if isinstance(value := row.get(field), int | float):
        yield Sample(name, float(value), labels)


def _of_attempts(attempts: list[Life]) -> Iterator[Sample]:
    yield Sample("zaya_attempts_total", float(len(attempts)))
    ends = collections.Counter(attempt.end or KILLED for attempt in attempts[:-1])
    if attempts:
        newest = attempts[-1]
        yield Sample("zaya_running", float(newest.end is None))
        yield Sample("zaya_last_word_timestamp_seconds", newest.ended)
        # Whether a life without an end goes on is known when the next one has begun.
        if newest.end is not None:
            ends[newest.end] += 1
    yield from _counted("zaya_ends_total", "end", ends, (*ENDS, KILLED))


def _of_decisions(decisions: list[dict[str, Any]]) -> Iterator[Sample]:
    # A dry run's were not carried out.
    actions = [(str(event.get("action")), event) for event in decisions if event.get("acted", True)]
    counts = collections.Counter(action for action, _ in actions)
    yield from _counted("zaya_decisions_total", "action", counts, ACTIONS)
    nodes = ((action, str(node)) for action, event in actions for node in _list(event.get("nodes")))
    yield from _paired("zaya_node_decisions_total", ("action", "node"), nodes)


def _paired(name: str, labels: tuple[str, str], pairs: Iterable[tuple[str, str]]) -> Iterator[Sample]:
    counts = collections.Counter((_word(first), _word(second)) for first, second in pairs)
    for values, number in counts.most_common(MOST_PAIRS):
        yield Sample(name, float(number), dict(zip(labels, values, strict=True)))


def _counted(name: str, label: str, counts: Mapping[str, int], known: tuple[str, ...]) -> Iterator[Sample]:
    """Samples by a label; values that are known are there from the first scrape on.

    A series that begins at 1 has never grown, as Prometheus sees it, and no alert would tell of it.
    """
    shown = collections.Counter[str]()
    for value, number in (dict.fromkeys(known, 0) | dict(counts)).items():
        shown[_word(value)] += number
    for value, number in sorted(shown.items(), key=lambda item: (item[0] not in known, -item[1]))[
        :MOST_VALUES
    ]:
        yield Sample(name, float(number), {label: value})


def _word(value: str) -> str:
    return value[:MOST_CHARACTERS]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
