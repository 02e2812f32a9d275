"""The cause of the end of an attempt and the hosts at fault, from its events and sightings.

One failure leaves many traces: the other processes lose a peer, wait in a collective, or are aborted. The
most specific trace is the cause, and the rest are its consequences.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.run_folder.names import CORRUPTED, DIVERGED, STALLED, STOPPED
from zaya_jax.train.step.integrity import ORDER, ROWS

OUT_OF_MEMORY, PROGRAM_ERROR, CRASHED = "host_out_of_memory", "program_error", "crashed"
"""Classes of lines of a log whose host is the one at fault."""
CUT_OFF = "coordinator_lost"
"""Class of lines that name the process that is cut off from process 0."""
_PROCESS = re.compile(r"process \d+ on (\S+) ")
ERROR, MEMORY, NETWORK, STALL, DIVERGENCE = "error", "out of memory", "network", "stall", "divergence"
STOP_SIGNAL = "stop signal"
"""Causes besides corrupted values and signals."""
_TENSORS = {
    ROWS: "inputs",
    ORDER: "order of the batches",
    "gradient of ": "gradients",
    "router_bias": "balancing biases",
    "optimizer/": "moments",
    "buckets/": "weights",
    "frozen/": "weights",
}
"""What is corrupted, by a part of the tensor's name; the first one that it contains counts."""


@dataclasses.dataclass(frozen=True)
class Diagnosis:
    """Cause of the end of an attempt.

    Attributes:
      cause: a few words, such as "killed" or "corrupted moments"; "" if it is not known.
      hosts: hosts on which it occurred; empty if they are not known.
    """

    cause: str = ""
    hosts: tuple[str, ...] = ()


UNKNOWN = Diagnosis()


def diagnose(
    events: Sequence[Mapping[str, Any]], sightings: Sequence[Sighting], nodes: Sequence[str]
) -> Diagnosis:
    """Returns the most specific cause that the traces of an attempt show.

    Args:
      events: events of the attempt.
      sightings: sightings on its nodes.
      nodes: nodes of the attempt; other hosts belong to other jobs.
    """
    for find in _RULES:
        diagnosis = find(events, sightings)
        if diagnosis is not None:
            # Each host once, in the order of the nodes.
            hosts = tuple(node for node in nodes if node in diagnosis.hosts)
            return dataclasses.replace(diagnosis, hosts=hosts)
    return UNKNOWN


_Rule = Callable[[Sequence[Mapping[str, Any]], Sequence[Sighting]], Diagnosis | None]


def _from_corruption(events: Sequence[Mapping[str, Any]], _: Sequence[Sighting]) -> Diagnosis | None:
    event = next((each for each in events if each["event"] == CORRUPTED), None)
    if event is None:
        return None
    # The first finding is of the earliest step.
    tensor = event["findings"][0]["tensor"]
    what = next((what for part, what in _TENSORS.items() if part in tensor), tensor)
    return Diagnosis(f"corrupted {what}", tuple(event["hosts"]))


def _from_event(kind: str, cause: str) -> _Rule:
    def find(events: Sequence[Mapping[str, Any]], _: Sequence[Sighting]) -> Diagnosis | None:
        event = next((each for each in events if each["event"] == kind), None)
        if event is None:
            return None
        return Diagnosis(cause, tuple(event.get("hosts", ())))

    return find


def _from_cut_off(events: Sequence[Mapping[str, Any]], sightings: Sequence[Sighting]) -> Diagnosis | None:
    """Finds late processes that report their network, which one that hangs does not."""
    stall, cut_off = _from_event(STALLED, NETWORK)(events, sightings), _from_network(events, sightings)
    return stall if stall and stall.hosts and cut_off and set(stall.hosts) <= set(cut_off.hosts) else None


def _from_network(_: Sequence[Mapping[str, Any]], sightings: Sequence[Sighting]) -> Diagnosis | None:
    names = (_PROCESS.search(each.evidence) for each in sightings if each.name == CUT_OFF)
    hosts = tuple(name[1] for name in names if name is not None)
    return Diagnosis(NETWORK, hosts) if hosts else None


def _from_sightings(name: str, cause: str | None = None) -> _Rule:
    def find(_: Sequence[Mapping[str, Any]], sightings: Sequence[Sighting]) -> Diagnosis | None:
        named = [each for each in sightings if each.name == name]
        if not named:
            return None
        # The last words of "launch: error: process 2: Segmentation fault".
        ending = named[0].evidence.rpartition(": ")[2].lower()
        return Diagnosis(cause or ending, tuple(each.host for each in named))

    return find


_RULES: tuple[_Rule, ...] = (
    # Results of checks, which end a run in good order and name the device.
    _from_corruption,
    _from_event(DIVERGED, DIVERGENCE),
    # After a stall all processes end themselves, so that no other trace is a cause.
    _from_cut_off,
    _from_event(STALLED, STALL),
    _from_event(STOPPED, STOP_SIGNAL),
    # Memory first: the exception or the crash that it causes has another class.
    _from_sightings(OUT_OF_MEMORY, MEMORY),
    _from_sightings(CRASHED),
    _from_sightings(PROGRAM_ERROR, ERROR),
    # Last, because every end of process 0 cuts off all others.
    _from_network,
)
