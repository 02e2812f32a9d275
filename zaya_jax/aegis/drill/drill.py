"""Fault plans of drills, and their scores.

A drill is a small supervised run with faults of every kind in a seeded order. Its score says which faults
were detected, how long each recovery took, and which alarms were false.
"""

import dataclasses
import pathlib
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.aegis.agent.sightings import read_sightings
from zaya_jax.aegis.views.goodput import Goodput, measure
from zaya_jax.run_folder.events import events_of
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
    WENT_BACK,
)
from zaya_jax.train.heartbeats import COMPILE

SAVE_EVERY = 20
"""Number of steps between two checkpoints of the run."""
SPIKE_STEPS = 8
"""Number of steps of a planned loss spike."""
ALARMS = (STALLED, FAILED, DIVERGED, WENT_BACK, SPIKED, STARVED, SKIPPED, DAMAGED, CORRUPTED)
QUIET = ("done", "requeue")
"""Actions of decisions that are not alarms."""


@dataclasses.dataclass(frozen=True)
class PlannedFault:
    """A fault of a drill.

    Attributes:
      kind: kind of the fault, a key of `KINDS`.
      step: step before which it occurs.
      spec: specification for the variable `ZAYA_FAULT`.
    """

    kind: str
    step: int
    spec: str


KINDS: dict[str, str] = {
    "kill": "kill@step={step}:process={process}",
    "kill of the first": "kill@step={step}:process=0",
    "abort": "abort@step={step}:process={process}",
    "told to end": "terminate@step={step}:process={process}",
    "error": "fail@step={step}:process={process}",
    "paused": "pause@step={step}:process={process}",
    "hang": "hang@step={step}:process={process}",
    "hang with lock": "lock@step={step}:process={process}",
    "nan": "nan@step={step}:process={process}",
    "spike": f"spike@step={{step}}:steps={SPIKE_STEPS}",
    "divergence": "flip@step={step}:process={process}",
    "corruption": "corrupt@step={step}:process=0,kill@step={next}:process={process}",
}
"""Specifications of all kinds of faults, with placeholders."""
NOTICED_BY: dict[str, tuple[str, ...]] = {
    "paused": (STALLED,),
    "hang": (STALLED,),
    "hang with lock": (STALLED,),
    "nan": (SKIPPED,),
    "spike": (WENT_BACK,),
    "divergence": (DIVERGED,),
    "corruption": (DAMAGED,),
}
"""Events that show that a fault was detected; for other kinds it is a decision of the supervisor."""


def plan_faults(seed: int, *, count: int, processes: int, first: int = 60) -> list[PlannedFault]:
    """Plans faults of all kinds in rounds, each round in a different order, at steps with gaps between them.

    Args:
      seed: seed of the order, the processes and the steps.
      count: number of faults.
      processes: number of processes of the run.
      first: step after which faults begin; a loss spike is detected only after some losses.
    """
    generator, step, faults = random.Random(seed), first, []
    while len(faults) < count:
        # Every kind once in a round, so that a short drill has most of them.
        for kind in generator.sample(list(KINDS), len(KINDS)):
            # Between two checkpoints, so that a damaged checkpoint is still the newest one at the restart.
            step += SAVE_EVERY * generator.randint(1, 2)
            here = step - step % SAVE_EVERY + generator.randint(8, SAVE_EVERY - 4)
            spec = KINDS[kind].format(step=here, next=here + 1, process=generator.randrange(processes))
            faults.append(PlannedFault(kind, here, spec))
            step = here + (SPIKE_STEPS if kind == "spike" else 0)
    return faults[:count]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a fault.

    Attributes:
      kind: kind of the fault.
      step: step of the fault.
      noticed: whether the expected event followed.
      seconds: time in seconds from the fault to the first new step, by phase of the recovery; empty if no
        restart was needed.
    """

    kind: str
    step: int
    noticed: bool
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Total time in seconds from the fault to the first new step."""
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Score:
    """Score of a drill.

    Attributes:
      outcomes: results of all faults that occurred.
      alarms: false alarms of a run without faults; empty for other runs.
      goodput: goodput of the run.
    """

    outcomes: tuple[Outcome, ...]
    alarms: tuple[str, ...]
    goodput: Goodput

    def recoveries(self) -> list[Outcome]:
        """Returns the outcomes with a restart or a rollback, the shortest first."""
        return sorted((each for each in self.outcomes if each.seconds), key=lambda each: each.total)

    def parts(self) -> dict[str, float]:
        """Returns the median duration of each phase of a recovery in seconds."""
        recoveries = [each.seconds for each in self.recoveries()]
        names = dict.fromkeys(name for each in recoveries for name in each)
        return {name: statistics.median(each.get(name, 0.0) for each in recoveries) for name in names}


def score_run(run_folder: str | pathlib.Path, faults: Sequence[PlannedFault]) -> Score:
    """Scores a drill from the events of its run.

    Args:
      run_folder: folder of the run.
      faults: planned faults; empty for a run without faults.

    Raises:
      UserError: if the run has not begun its first step.
    """
    folder = pathlib.Path(run_folder)
    events = events_of(folder)
    times = ((when, fault) for fault in faults if (when := _when(folder, fault)) is not None)
    # By time alone: two faults may strike at the same time, and faults have no order.
    struck = sorted(times, key=lambda pair: pair[0])
    outcomes = []
    for number, (when, fault) in enumerate(struck):
        until = struck[number + 1][0] if number + 1 < len(struck) else float("inf")
        outcomes.append(_outcome(fault, when, until, events))
    # With faults an alarm may be right; only a run without any has false ones alone.
    return Score(tuple(outcomes), () if faults else tuple(_alarms(folder, events)), measure(events))


def _when(folder: pathlib.Path, fault: PlannedFault) -> float | None:
    """Returns the time of a fault, from the file that it creates; None if it did not occur."""
    # A specification may have several faults, such as a damaged checkpoint and then a kill; the first one
    # counts.
    kind = fault.spec.split("@")[0]
    # Every process that injects a fault creates a file, so that the fault occurs once in all attempts.
    times = [path.stat().st_mtime for path in (folder / FAULTS_FOLDER).glob(f"{kind}-{fault.step}-*")]
    return min(times, default=None)


def _outcome(fault: PlannedFault, when: float, until: float, events: Sequence[Mapping[str, Any]]) -> Outcome:
    between = [event for event in events if when <= event["time"] < until]
    kinds = NOTICED_BY.get(fault.kind, (DECIDED,))
    noticed = any(event["event"] in kinds for event in between)
    return Outcome(fault.kind, fault.step, noticed, _parts(when, between))


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


def _alarms(folder: pathlib.Path, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the alarms of a run without faults, all of which are false."""
    alarms = [f"{event['event']}: {event.get('reason')}" for event in events if event["event"] in ALARMS]
    decided = [event for event in events if event["event"] == DECIDED]
    alarms += [f"{e.get('action')}: {e.get('reason')}" for e in decided if e.get("action") not in QUIET]
    sightings = [each for each in read_sightings(folder) if each.action != "note"]
    return alarms + [f"{each.host}: {each.name}: {each.evidence}" for each in sightings]
