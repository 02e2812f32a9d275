"""What is to be done when the processes of a run have ended: a pure function of what is known of it.

A restart costs minutes of a whole cluster, and one that cannot help costs them again; a node that is left out
without need is paid for by whoever waits for it. So what is not known to be a node's fault is tried again on
the same nodes, and what did not help so often is left to a human.
"""

import collections
import dataclasses
from collections.abc import Sequence

from zaya_jax.aegis.sightings import Sighting

ACTIONS = "restart", "leave out", "wait", "requeue", "stop", "done"
RESTART, LEAVE_OUT, WAIT, REQUEUE, STOP, DONE = ACTIONS
"""Begin anew on the same nodes; without some of them; when something may have come back by itself; leave the
rest to the next allocation; leave it to a human; nothing is left to be done."""


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """What a supervisor may do.

    Attributes:
      nodes: that an attempt uses, as long as there are so many; others are spare.
      least_nodes: with fewer the run does not go on.
      most_idle: attempts in a row without progress, behind which a human is called.
      strikes: of the newest attempts in which a node was late, that are one too many.
      wait_seconds: for what may come back by itself; twice as long each time that it did not help.
    """

    nodes: int = 1
    least_nodes: int = 1
    most_idle: int = 4
    strikes: int = 2
    wait_seconds: float = 30.0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """How an attempt ended.

    Attributes:
      code: exit code of the first process that failed.
      has_progressed: whether the run has come further than ever before.
      nodes: that it ran on.
      late: of them, for which the others waited.
      wrong: of them, whose devices held other numbers.
      sightings: of its nodes, in its time.
      was_asked: whether somebody asked the supervisor to stop.
      lost_seconds: of its steps that are to be made again.
    """

    code: int
    has_progressed: bool
    nodes: tuple[str, ...]
    late: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    was_asked: bool = False
    lost_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What is to be done, and why.

    Attributes:
      action: one of the above.
      reason: a sentence.
      evidence: lines and readings that it rests on.
      nodes: that are left out from now on.
      wait_seconds: before the next attempt.
      page: whether a human is to hear of it.
      cost_seconds: of the whole run: what is lost, and what waiting takes.
    """

    action: str
    reason: str
    evidence: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    page: bool = False
    cost_seconds: float = 0.0


def decide(attempts: Sequence[Attempt], usable: Sequence[str], policy: RestartPolicy) -> Decision:
    """What is to be done behind the newest attempt.

    Args:
      attempts: of this supervisor, the newest last.
      usable: nodes that the next attempt could have, those that are left out already not among them.
      policy: what may be done.
    """
    decision = _by_code(attempts[-1]) or _by_nodes(attempts, usable, policy) or _by_progress(attempts, policy)
    return dataclasses.replace(decision, cost_seconds=attempts[-1].lost_seconds + decision.wait_seconds)


def _by_code(attempt: Attempt) -> Decision | None:
    """What an exit code of `zaya train` decides by itself."""
    if attempt.code and attempt.was_asked:
        return Decision(REQUEUE, f"asked to stop; the run ended with code {attempt.code}")
    return _BY_CODE.get(attempt.code)


def _by_nodes(attempts: Sequence[Attempt], usable: Sequence[str], policy: RestartPolicy) -> Decision | None:
    """Leaves nodes out that are known to be at fault, as long as enough are left."""
    guilty = _guilty(attempts, policy)
    if not guilty:
        return None
    evidence = tuple(reason for reasons in guilty.values() for reason in reasons)
    left = [node for node in usable if node not in guilty]
    names = ", ".join(guilty)
    if len(left) >= policy.least_nodes:
        return Decision(LEAVE_OUT, f"without {names}", evidence, tuple(guilty), page=True)
    reason = (
        f"{names} should be left out, and {len(left)} of at least {policy.least_nodes} nodes would be left"
    )
    # A run that stands is worth no more than one that may fail again, and is watched: a human is on the way.
    return dataclasses.replace(_by_progress(attempts, policy), reason=reason, page=True)


def _guilty(attempts: Sequence[Attempt], policy: RestartPolicy) -> dict[str, list[str]]:
    """Nodes that must not be used again, with what speaks against each."""
    newest = attempts[-1]
    found: dict[str, list[str]] = collections.defaultdict(list)
    for node in newest.wrong:
        found[node].append(f"devices of {node} held other numbers than the rest")
    for each in newest.sightings:
        if each.action == "drain" and each.host in newest.nodes:
            found[each.host].append(f"{each.host}: {each.name}: {each.evidence}")
    # A node that was late once may have been unlucky; a run without all of its nodes is another matter.
    for node in newest.late:
        times = sum(node in attempt.late for attempt in attempts[-policy.strikes :])
        if times >= policy.strikes and len(newest.nodes) > 1:
            found[node].append(f"the others waited for {node} in {times} attempts in a row")
    return dict(found)


def _by_progress(attempts: Sequence[Attempt], policy: RestartPolicy) -> Decision:
    """Tries again, at once or later, as long as that has not been in vain too often."""
    newest = attempts[-1]
    idle = 0
    for attempt in reversed(attempts):
        if attempt.has_progressed:
            break
        idle += 1
    reason = f"the run ended with code {newest.code}{_MEANINGS.get(newest.code, '')}"
    evidence = _evidence(newest.sightings)
    if idle >= policy.most_idle:
        return Decision(STOP, f"{reason}, and {idle} attempts in a row came no further", evidence, page=True)
    actions = {each.action for each in newest.sightings}
    # The first attempt that comes no further may have had bad luck; from the second on each waits longer.
    pause = policy.wait_seconds * 2 ** max(idle - 1, 0)
    page = "page" in actions
    if "wait" in actions:
        names = ", ".join(sorted({each.name for each in newest.sightings if each.action == "wait"}))
        return Decision(WAIT, f"{reason}; {names} may pass", evidence, (), pause, page)
    if idle > 1:
        return Decision(WAIT, f"{reason}, the {idle}th time without progress", evidence, (), pause / 2, page)
    return Decision(RESTART, reason, evidence, page=page)


def _evidence(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    """A line for each class on each host, the first that was seen."""
    first = {(each.host, each.name): each.evidence for each in reversed(sightings)}
    return tuple(f"{host}: {name}: {evidence}" for (host, name), evidence in sorted(first.items()))


_BY_CODE = {
    0: Decision(DONE, "the run has all its steps"),
    2: Decision(STOP, "the run was refused: its sentence says what to mend", page=True),
    65: Decision(STOP, "something on the disk is not what was written: see its sentence", page=True),
    130: Decision(STOP, "somebody interrupted it"),
}
_MEANINGS = {
    75: ": it was told to end, and saved",
    76: ": devices held different numbers",
    124: ": it stood still",
    134: ": a process was aborted",
    137: ": a process was killed",
    139: ": a process crashed",
}
