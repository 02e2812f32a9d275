"""A drill: a small run, faults of every kind in a seeded order, and what became of each.

What is scored is what an operator would ask at night: was it noticed, was it mended without a hand, how long
did that take, and what was said where there was nothing.
"""

import dataclasses
import pathlib
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.aegis.faults import FOLDER
from zaya_jax.aegis.goodput import Goodput, measure
from zaya_jax.aegis.heartbeats import COMPILE
from zaya_jax.aegis.journal import (
    AT,
    BEGAN,
    DAMAGED,
    DECIDED,
    DIVERGED,
    FAILED,
    SKIPPED,
    SPIKED,
    STALLED,
    STARVED,
    WENT_BACK,
    events_of,
)
from zaya_jax.aegis.sightings import read_sightings

SAVE_EVERY = 20
"""Steps between two checkpoints of the run."""
SPIKE_STEPS = 8
"""Steps that an ordered spike lasts."""
ALARMS = (STALLED, FAILED, DIVERGED, WENT_BACK, SPIKED, STARVED, SKIPPED, DAMAGED)
QUIET = ("done", "requeue")
"""Decisions that are no alarm."""


@dataclasses.dataclass(frozen=True)
class OrderedFault:
    """A fault of a drill.

    Attributes:
      kind: as a drill calls it.
      step: before which it strikes.
      words: of it, as `ZAYA_FAULT` takes them.
    """

    kind: str
    step: int
    words: str


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
"""All that a drill orders, and how."""
NOTICED_BY: dict[str, tuple[str, ...]] = {
    "paused": (STALLED,),
    "hang": (STALLED,),
    "hang with lock": (STALLED,),
    "nan": (SKIPPED,),
    "spike": (WENT_BACK,),
    "divergence": (DIVERGED,),
    "corruption": (DAMAGED,),
}
"""The event that must follow, where it is not that the supervisor decides."""


def order_faults(seed: int, *, count: int, processes: int, first: int = 60) -> list[OrderedFault]:
    """Faults of all kinds in turn, each turn in another order, at steps that leave room between them.

    Args:
      seed: of the order, the processes and the steps.
      count: of faults.
      processes: of the run.
      first: step that the first one is behind; a spike needs losses before it.
    """
    drawn, step, orders = random.Random(seed), first, []
    while len(orders) < count:
        for kind in drawn.sample(list(KINDS), len(KINDS)):
            # In the middle between two saves: what is damaged is to be the newest still when it is read.
            step += SAVE_EVERY * drawn.randint(1, 2)
            here = step - step % SAVE_EVERY + drawn.randint(8, SAVE_EVERY - 4)
            words = KINDS[kind].format(step=here, next=here + 1, process=drawn.randrange(processes))
            orders.append(OrderedFault(kind, here, words))
            step = here + (SPIKE_STEPS if kind == "spike" else 0)
    return orders[:count]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a fault.

    Attributes:
      kind: of it.
      step: of it.
      noticed: whether that which must follow did.
      seconds: from the fault to the first new step, by what they went into; empty for what needs none.
    """

    kind: str
    step: int
    noticed: bool
    seconds: Mapping[str, float]

    @property
    def total(self) -> float:
        """Seconds from the fault to the first new step."""
        return sum(self.seconds.values())


@dataclasses.dataclass(frozen=True)
class Score:
    """Of a drill.

    Attributes:
      outcomes: of all faults that struck.
      alarms: what was said where there was nothing; of an undisturbed run.
      goodput: of the run.
    """

    outcomes: tuple[Outcome, ...]
    alarms: tuple[str, ...]
    goodput: Goodput

    def recoveries(self) -> list[Outcome]:
        """Of faults that cost a restart or a way back, the shortest first."""
        return sorted((each for each in self.outcomes if each.seconds), key=lambda each: each.total)

    def parts(self) -> dict[str, float]:
        """The median of each part of a recovery, in seconds."""
        found = [each.seconds for each in self.recoveries()]
        names = dict.fromkeys(name for each in found for name in each)
        return {name: statistics.median(each.get(name, 0.0) for each in found) for name in names}


def score(run_folder: str | pathlib.Path, orders: Sequence[OrderedFault]) -> Score:
    """What became of a drill's faults, by what its run wrote down.

    Raises:
      ValueError: if the run has not begun its first step.
    """
    folder = pathlib.Path(run_folder)
    events = events_of(folder)
    struck = sorted((when, order) for order in orders if (when := _when(folder, order)) is not None)
    outcomes = []
    for number, (when, order) in enumerate(struck):
        until = struck[number + 1][0] if number + 1 < len(struck) else float("inf")
        outcomes.append(_outcome(order, when, until, events))
    return Score(tuple(outcomes), () if orders else tuple(_alarms(folder, events)), measure(events))


def _when(folder: pathlib.Path, order: OrderedFault) -> float | None:
    """When a fault struck first, by the file that says so."""
    kind = order.words.split("@")[0]
    times = [path.stat().st_mtime for path in (folder / FOLDER).glob(f"{kind}-{order.step}-*")]
    return min(times, default=None)


def _outcome(order: OrderedFault, when: float, until: float, events: Sequence[Mapping[str, Any]]) -> Outcome:
    between = [event for event in events if when <= event["time"] < until]
    kinds = NOTICED_BY.get(order.kind, (DECIDED,))
    noticed = any(event["event"] in kinds for event in between)
    return Outcome(order.kind, order.step, noticed, _parts(when, between))


def _parts(when: float, events: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds from a fault to the first new step behind it; empty as long as there is none."""
    # The last life before the next fault: the first one may have been cut short by the same cause.
    begins = [n for n, event in enumerate(events) if event["event"] == BEGAN]
    if not begins:  # a step was skipped, and the run went on; or it is over
        return {}
    began = events[begins[-1]]
    first = next((event for event in events[begins[-1] :] if event["event"] == AT), None)
    if first is None:
        return {}
    ended = [e["time"] for e in events[: begins[-1]] if e["event"] in (DECIDED, WENT_BACK)]
    noticed = max(ended, default=when)
    opened = began["time"] - sum(began["seconds"].values())
    compiled = began["seconds"].get(COMPILE, 0.0)
    return {
        "notice and end": noticed - when,
        "begin processes": max(opened - noticed, 0.0),
        "restore": began["time"] - max(opened, noticed) - compiled,
        "compile and first step": first["time"] - began["time"] + compiled,
    }


def _alarms(folder: pathlib.Path, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """All that was said of an undisturbed run as if it were none."""
    found = [f"{event['event']}: {event.get('reason')}" for event in events if event["event"] in ALARMS]
    decided = [event for event in events if event["event"] == DECIDED]
    found += [f"{e.get('action')}: {e.get('reason')}" for e in decided if e.get("action") not in QUIET]
    seen = [each for each in read_sightings(folder) if each.action != "note"]
    return found + [f"{each.host}: {each.name}: {each.evidence}" for each in seen]
