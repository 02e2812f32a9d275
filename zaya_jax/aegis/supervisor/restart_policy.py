"""The decision after an attempt of a run has ended: a pure function of what is known about the attempts.

A restart costs minutes of a whole cluster, and a useless one costs them again; a node that is excluded
without need is lost to all its users. So failures that are not known to be the fault of a node are retried on
the same nodes, and after several attempts without progress a human decides.
"""

import collections
import dataclasses
from collections.abc import Sequence

from zaya_jax.aegis.agent.sightings import Sighting
from zaya_jax.aegis.supervisor.diagnosis import ERROR, UNKNOWN, Diagnosis
from zaya_jax.errors import DAMAGED, DIVERGED, INTERRUPTED, RESUMABLE, TIMED_OUT, USER_ERROR

ACTIONS = "restart", "leave out", "wait", "requeue", "stop", "done"
RESTART, EXCLUDE, WAIT, REQUEUE, STOP, DONE = ACTIONS
"""Actions: restart on the same nodes; restart without some nodes; restart after a pause;
leave the rest to the next allocation; leave it to a human; nothing, because the run is complete."""


@dataclasses.dataclass(frozen=True)
class RestartPolicy:
    """Limits of a supervisor's decisions.

    Attributes:
      nodes: number of nodes that an attempt uses if available; the others are spare.
      min_nodes: minimum number of nodes; with fewer the run stops.
      max_attempts_without_progress: number of consecutive attempts without progress after which the run
        stops.
      strikes: number of consecutive attempts that ended on a node after which the node is excluded.
      wait_seconds: first pause in seconds before an attempt; it doubles with each attempt without progress.
    """

    nodes: int = 1
    min_nodes: int = 1
    max_attempts_without_progress: int = 4
    strikes: int = 2
    wait_seconds: float = 30.0


@dataclasses.dataclass(frozen=True)
class Attempt:
    """Summary of an attempt that has ended.

    Attributes:
      code: exit code of the first process that failed.
      has_progressed: whether the newest checkpoint is later than those of all previous attempts.
      nodes: nodes of the attempt.
      diagnosis: cause of its end, and the nodes on which it occurred.
      diverged: nodes whose devices had wrong values.
      sightings: sightings on its nodes during the attempt.
      stop_requested: whether the supervisor was requested to stop.
      lost_seconds: time in seconds of steps that must be repeated.
    """

    code: int
    has_progressed: bool
    nodes: tuple[str, ...]
    diagnosis: Diagnosis = UNKNOWN
    diverged: tuple[str, ...] = ()
    sightings: tuple[Sighting, ...] = ()
    stop_requested: bool = False
    lost_seconds: float = 0.0


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to do after an attempt.

    Attributes:
      action: one of `ACTIONS`.
      reason: explanation, one sentence.
      evidence: lines of logs and sensor readings that support it.
      nodes: nodes to exclude from later attempts.
      wait_seconds: pause in seconds before the next attempt.
      page: whether to notify a human.
      cost_seconds: time in seconds that the run loses: steps to repeat, and the pause.
      cause: cause of the end of the attempt in a few words; "" if it is not known.
      hosts: nodes on which it occurred; empty if they are not known.
    """

    action: str
    reason: str
    evidence: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    wait_seconds: float = 0.0
    page: bool = False
    cost_seconds: float = 0.0
    cause: str = ""
    hosts: tuple[str, ...] = ()


def decide(attempts: Sequence[Attempt], usable: Sequence[str], policy: RestartPolicy) -> Decision:
    """Decides what to do after the newest attempt.

    Args:
      attempts: all attempts of this supervisor, the newest last.
      usable: nodes that respond and are not excluded.
      policy: limits of the decision.
    """
    # From the most specific to the most general: a clear exit code, a faulty node, a retry.
    decision = _by_code(attempts[-1]) or _by_nodes(attempts, usable, policy) or _by_progress(attempts, policy)
    newest = attempts[-1]
    cost, found = newest.lost_seconds + decision.wait_seconds, newest.diagnosis
    return dataclasses.replace(decision, cost_seconds=cost, cause=found.cause, hosts=found.hosts)


def _by_code(attempt: Attempt) -> Decision | None:
    """Returns the decision for exit codes of `zaya train` that need no further information."""
    # A scheduler sends the signal before the time limit of a job; the next allocation continues the run.
    if attempt.code and attempt.stop_requested:
        return Decision(REQUEUE, f"a stop was requested; the run ended with code {attempt.code}")
    return _BY_CODE.get(attempt.code)


def _by_nodes(attempts: Sequence[Attempt], usable: Sequence[str], policy: RestartPolicy) -> Decision | None:
    """Excludes nodes that are known to be at fault, if enough others are usable."""
    faulty = _faulty_nodes(attempts, policy)
    if not faulty:
        return None
    evidence = tuple(reason for reasons in faulty.values() for reason in reasons)
    left = [node for node in usable if node not in faulty]
    names = ", ".join(faulty)
    if len(left) >= policy.min_nodes:
        return Decision(EXCLUDE, f"without {names}", evidence, tuple(faulty), page=True)
    reason = (
        f"{names} should be excluded, but only {len(left)} of at least {policy.min_nodes} nodes would be left"
    )
    # Continue anyway: a run that may fail again is better than one that is stopped until a human comes.
    return dataclasses.replace(_by_progress(attempts, policy), reason=reason, page=True)


def _faulty_nodes(attempts: Sequence[Attempt], policy: RestartPolicy) -> dict[str, list[str]]:
    """Returns the nodes that must not be used again, with the evidence against each."""
    newest = attempts[-1]
    evidence: dict[str, list[str]] = collections.defaultdict(list)
    # Wrong values are not retried: a device that computes wrong results once will do so again.
    for node in newest.diverged:
        evidence[node].append(f"devices of {node} hold diverging values")
    for each in newest.sightings:
        if each.action == "drain" and each.host in newest.nodes:
            evidence[each.host].append(f"{each.host}: {each.name}: {each.evidence}")
    # Once may be bad luck, an error of the program ends on any node, and what ends on most nodes is not their
    # fault. With a single node there is no other node to compare it with.
    cause, hosts = newest.diagnosis.cause, newest.diagnosis.hosts
    for node in hosts if cause != ERROR and 2 * len(hosts) <= len(newest.nodes) else ():
        times = sum(node in attempt.diagnosis.hosts for attempt in attempts[-policy.strikes :])
        if times >= policy.strikes:
            evidence[node].append(f"{times} attempts in a row ended on {node}, the last one by: {cause}")
    return dict(evidence)


def _by_progress(attempts: Sequence[Attempt], policy: RestartPolicy) -> Decision:
    """Retries, at once or after a pause, until too many attempts in a row made no progress."""
    newest = attempts[-1]
    idle = 0
    for attempt in reversed(attempts):
        if attempt.has_progressed:
            break
        idle += 1
    reason = f"the run ended with code {newest.code}{_MEANINGS.get(newest.code, '')}"
    if newest.diagnosis.hosts:
        reason += f"; {newest.diagnosis.cause} on {', '.join(newest.diagnosis.hosts)}"
    evidence = _evidence(newest.sightings)
    if idle >= policy.max_attempts_without_progress:
        return Decision(STOP, f"{reason}, and {idle} attempts in a row made no progress", evidence, page=True)
    actions = {each.action for each in newest.sightings}
    # The first attempt without progress may be bad luck; from the second on each pause is longer.
    # Exponential backoff.
    pause = policy.wait_seconds * 2 ** max(idle - 1, 0)
    page = "page" in actions
    # The rule says that the cause passes: a restart at once would meet it again.
    if "wait" in actions:
        names = ", ".join(sorted({each.name for each in newest.sightings if each.action == "wait"}))
        return Decision(WAIT, f"{reason}; {names} may pass", evidence, (), pause, page)
    if idle > 1:
        return Decision(WAIT, f"{reason}, the {idle}th time without progress", evidence, (), pause / 2, page)
    return Decision(RESTART, reason, evidence, page=page)


def _evidence(sightings: Sequence[Sighting]) -> tuple[str, ...]:
    """Returns the first line of each class on each host."""
    # Reversed, so that of several lines the earliest one is kept.
    first = {(each.host, each.name): each.evidence for each in reversed(sightings)}
    return tuple(f"{host}: {name}: {evidence}" for (host, name), evidence in sorted(first.items()))


_BY_CODE = {
    0: Decision(DONE, "the run is complete"),
    USER_ERROR: Decision(STOP, "the run was rejected; fix what its error message says", page=True),
    DAMAGED: Decision(STOP, "a file on disk is damaged; see the error message", page=True),
    INTERRUPTED: Decision(STOP, "the run was interrupted by a user"),
}
_MEANINGS = {
    RESUMABLE: ": it saved its state after a stop signal, or lost another process",
    DIVERGED: ": devices hold diverging or corrupted values",
    TIMED_OUT: ": it stalled",
    # 128 plus the number of the signal that ended the process: SIGABRT, SIGKILL and SIGSEGV.
    134: ": a process was aborted",
    137: ": a process was killed",
    139: ": a process crashed",
}
