"""Scores of a drill: what a run reported about each fault, compared with the faults that occurred.

What was reported comes from events and sightings alone, which a user sees too. The faults that occurred come
from the files that the injection leaves, and are only compared with it.
"""

import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.aegis.drill.campaign import FaultTrial
from zaya_jax.aegis.supervisor import diagnosis
from zaya_jax.aegis.watch.fault_effects import CHECKPOINT_FAULTS
from zaya_jax.aegis.watch.fault_injection import parse_faults
from zaya_jax.run_folder.names import (
    AT,
    BEGAN,
    CORRUPTED,
    DAMAGED,
    DECIDED,
    DIVERGED,
    FAILED,
    FAULTS_FOLDER,
    SKIPPED,
    SPIKED,
    STALLED,
    STARVED,
    STRAGGLING,
    WENT_BACK,
)
from zaya_jax.train.heartbeats import COMPILE

SLOW, NOT_FINITE, SPIKE, DAMAGED_CHECKPOINT = "slow", "not finite", "loss spike", "damaged checkpoint"
CAUSES = {
    "kill": "killed",
    "kill_restore": "killed",
    "segfault": "segmentation fault",
    "abort": "aborted",
    "exhaust": diagnosis.MEMORY,
    "terminate": diagnosis.STOP_SIGNAL,
    "fail": diagnosis.ERROR,
    "fail_thread": diagnosis.ERROR,
    "pause": diagnosis.STALL,
    "hang": diagnosis.STALL,
    "lock": diagnosis.STALL,
    "partition": diagnosis.NETWORK,
    "damage": diagnosis.NETWORK,
    "flip_weight": "corrupted weights",
    "flip_moment": "corrupted moments",
    "flip_gradient": "corrupted gradients",
    "flip_input": "corrupted inputs",
    "miscompute": "corrupted gradients",
    "flip": "corrupted balancing biases",
    **dict.fromkeys(("stale", "lost", "reorder"), "corrupted order of the batches"),
    **dict.fromkeys(CHECKPOINT_FAULTS, DAMAGED_CHECKPOINT),
    "slow": SLOW,
    "nan": NOT_FINITE,
    "spike": SPIKE,
}
"""What a user should read for each kind of fault."""
_WITHOUT_PLACE = (diagnosis.STOP_SIGNAL, NOT_FINITE, SPIKE)
"""Causes that concern all processes alike: those agree on a stop, and share one loss."""
_ALARMS = (STALLED, FAILED, DIVERGED, WENT_BACK, SPIKED, STARVED, SKIPPED, DAMAGED, CORRUPTED, STRAGGLING)
_QUIET = ("done", "requeue")
"""Actions of decisions that are not alarms."""


@dataclasses.dataclass(frozen=True, order=True)
class NamedCause:
    """What is wrong, as it was reported or as it is true.

    Attributes:
      cause: cause in a few words, one of the values of `CAUSES`; "" if none was named.
      place: host, or the step of a damaged checkpoint; "" if none was named.
    """

    cause: str
    place: str

    def __str__(self) -> str:
        return (
            f"{self.cause or 'unknown cause'} on {self.place}"
            if self.place
            else self.cause or "unknown cause"
        )


@dataclasses.dataclass(frozen=True)
class Truth:
    """Faults of a trial that occurred.

    Attributes:
      time: Unix time in seconds of the first one.
      findings: what should be reported.
    """

    time: float
    findings: frozenset[NamedCause]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a trial.

    Attributes:
      trial: the trial.
      truth: what should be reported.
      reported: what was reported.
      lost_steps: number of steps that were repeated.
      seconds: time in seconds from the fault to the first new step, by phase of the recovery; empty if no
        restart was needed.
      is_equal: whether steps and checkpoint after the fault have the bits of the undisturbed run; None for
        faults that change the course of a run.
    """

    trial: FaultTrial
    truth: frozenset[NamedCause]
    reported: frozenset[NamedCause]
    lost_steps: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    is_equal: bool | None = None

    @property
    def is_noticed(self) -> bool:
        """Whether an event or a decision named any cause during the trial."""
        return bool(self.reported)

    @property
    def is_named(self) -> bool:
        """Whether exactly the causes and places of the faults were reported."""
        return self.reported == self.truth

    @property
    def total(self) -> float:
        """Total time in seconds from the fault to the first new step."""
        return float(sum(self.seconds.values()))


def read_truth(run_folder: pathlib.Path, trial: FaultTrial) -> Truth | None:
    """Returns what occurred in a trial, from the files that the injection leaves; None if nothing did."""
    times, findings = [], set()
    for fault in parse_faults(trial.faults):
        # A fault in the step of all devices leaves a file of each process, of which only its own counts.
        process = "*" if fault.process is None else str(fault.process)
        for path in (run_folder / FAULTS_FOLDER).glob(f"{fault.name}-{process}"):
            cause = CAUSES[path.name.split("-")[0]]
            times.append(path.stat().st_mtime)
            findings.add(NamedCause(cause, "" if cause in _WITHOUT_PLACE else path.read_text()))
    return Truth(min(times), frozenset(findings)) if times else None


def find_reported(
    events: Sequence[Mapping[str, Any]], sightings: Sequence[Sighting]
) -> frozenset[NamedCause]:
    """Returns what events and sightings of some time say is wrong."""
    findings: set[NamedCause] = set()
    for event in events:
        findings |= {NamedCause(*each) for each in _REPORTS.get(event["event"], lambda _: ())(event)}
    # A decision has the lines that explain the end of an attempt. Without one they stand alone.
    if not any(event["event"] == DECIDED for event in events):
        alarms = (each for each in sightings if each.action == "page")
        findings |= {NamedCause(_NAMES.get(each.name, each.name), each.host) for each in alarms}
    return frozenset(findings)


_NAMES = {diagnosis.PROGRAM_ERROR: diagnosis.ERROR, diagnosis.OUT_OF_MEMORY: diagnosis.MEMORY}


def _of_decision(event: Mapping[str, Any]) -> list[tuple[str, str]]:
    if event.get("action") in _QUIET and not event.get("cause"):
        return []
    # A decision without a host is reported too: it notices the fault, but names nobody.
    return [(event.get("cause", ""), host) for host in event.get("hosts") or [""]]


_REPORTS = {
    DECIDED: _of_decision,
    STRAGGLING: lambda event: [(SLOW, event["host"])],
    SKIPPED: lambda _: [(NOT_FINITE, "")],
    WENT_BACK: lambda _: [(SPIKE, "")],
    DAMAGED: lambda event: [(DAMAGED_CHECKPOINT, str(event["step"]))],
}


def score_trial(
    trial: FaultTrial,
    truth: Truth,
    events: Sequence[Mapping[str, Any]],
    sightings: Sequence[Sighting],
    *,
    is_equal: bool | None = None,
) -> Outcome:
    """Compares what was reported from a fault to the next one with what occurred.

    Args:
      trial: the trial.
      truth: what occurred.
      events: events from the fault on, until the next one.
      sightings: sightings of that time.
      is_equal: see `Outcome`.
    """
    # From the fault on: what was reported before belongs to the trial before.
    reported, parts = find_reported(events, sightings), _parts(truth.time, events)
    # Steps since the checkpoint from which the last attempt resumed, up to the last one that had been made: a
    # fault may be noticed some steps later.
    began = [event["step"] for event in events if event["event"] == BEGAN]
    made = [
        trial.step - 1,
        *(e["step"] for e in events if e["event"] in (CORRUPTED, DIVERGED, WENT_BACK, FAILED)),
    ]
    lost = max(made) - began[-1] if began else 0
    return Outcome(trial, truth.findings, reported, max(lost, 0), parts, is_equal)


def _parts(when: float, events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the time from a fault to the first new step, by phase; empty if there is none."""
    # The last attempt before the next fault: the first ones may have failed from the same cause.
    begins = [n for n, event in enumerate(events) if event["event"] == BEGAN]
    if not begins:  # the run continued without a restart, or has ended
        return {}
    began = events[begins[-1]]
    first = next((event for event in events[begins[-1] :] if event["event"] == AT), None)
    if first is None:
        return {}
    # A decision of the supervisor, or a rollback within the run, ends the detection.
    ended = [e["time"] for e in events[: begins[-1]] if e["event"] in (DECIDED, WENT_BACK)]
    noticed = max(ended, default=when)
    # The first report is made after the start sections, whose times lead back to the start.
    opened = began["time"] - sum(began["seconds"].values())
    compiled = began["seconds"].get(COMPILE, 0.0)
    return {
        "notice and end": noticed - when,
        "begin processes": max(opened - noticed, 0.0),
        "restore": began["time"] - max(opened, noticed) - compiled,
        "compile and first step": first["time"] - began["time"] + compiled,
    }


def median_parts(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Returns the median duration of each phase of the recoveries in seconds."""
    recoveries = [each.seconds for each in outcomes if each.seconds]
    names = dict.fromkeys(name for each in recoveries for name in each)
    return {name: statistics.median(each.get(name, 0.0) for each in recoveries) for name in names}


def find_alarms(events: Sequence[Mapping[str, Any]], sightings: Sequence[Sighting]) -> list[str]:
    """Returns the alarms of a run without faults, all of which are false."""
    alarms = [f"{event['event']}: {event.get('reason')}" for event in events if event["event"] in _ALARMS]
    decided = [event for event in events if event["event"] == DECIDED]
    alarms += [f"{e.get('action')}: {e.get('reason')}" for e in decided if e.get("action") not in _QUIET]
    noted = [each for each in sightings if each.action != "note"]
    return alarms + [f"{each.host}: {each.name}: {each.evidence}" for each in noted]
