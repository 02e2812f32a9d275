"""The cause of the end of an attempt and the hosts at fault, from its events and sightings.

One failure leaves many traces: the other processes lose a peer, wait in a collective, or are aborted. The
most specific trace is the cause, and the rest are its consequences.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.run_folder.names import CORRUPTED, DIVERGED, STALLED, STOPPED
from zaya_jax.train.step.integrity import ORDER, ROWS

OUT_OF_MEMORY, PROGRAM_ERROR, CRASHED, PEER_LOST = (
    "host_out_of_memory",
    "program_error",
    "crashed",
    "network_peer_lost",
)
"""Classes of the rules for logs that name the host on which they were seen."""
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
    stall = _from_event(STALLED, NETWORK)(events, sightings)
    cut_off = {each.host for each in sightings if each.name == PEER_LOST}
    return stall if stall and stall.hosts and cut_off.issuperset(stall.hosts) else None


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
    _from_corruption,
    _from_event(DIVERGED, DIVERGENCE),
    _from_cut_off,
    _from_event(STALLED, STALL),
    _from_event(STOPPED, STOP_SIGNAL),
    _from_sightings(OUT_OF_MEMORY, MEMORY),
    _from_sightings(CRASHED),
    _from_sightings(PROGRAM_ERROR, ERROR),
    _from_sightings(PEER_LOST, NETWORK),
)
