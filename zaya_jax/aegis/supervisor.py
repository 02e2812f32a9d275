"""Keeps a run going: begins its processes, sees how they end, decides, and does it.

One supervisor a job. What it decides is an event of the run, with cause, evidence, action and cost.
"""

import dataclasses
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zaya_jax import durable
from zaya_jax.aegis.deciding import DONE, LEAVE_OUT, REQUEUE, STOP, Attempt, Decision, RestartPolicy, decide
from zaya_jax.aegis.engines import RunEngine
from zaya_jax.aegis.goodput import find_attempts, redo_seconds
from zaya_jax.aegis.journal import DECIDED, DIVERGED, LEFT_OUT_FILE, STALLED, STARVED, events_of, write_event
from zaya_jax.aegis.paging import page
from zaya_jax.aegis.rules import LogRule, Rates, classify
from zaya_jax.aegis.sightings import Sighting, read_sightings, write_sighting
from zaya_jax.checkpoint import all_steps

_LOOK_SECONDS = 1.0
REQUEUE_CODE = 75
"""Of a supervisor that was asked to stop before its first attempt."""


@dataclasses.dataclass(frozen=True)
class Supervision:
    """What a supervisor goes by.

    Attributes:
      run_folder: of the run.
      rules: for what its processes complain of.
      policy: what it may do.
      dry_run: whether it only tells what it would do.
    """

    run_folder: str
    rules: Sequence[LogRule]
    policy: RestartPolicy
    dry_run: bool = False


class Supervisor:
    """Runs attempts one after the other, until the run is done or somebody else must decide.

    Args:
      engine: begins the processes.
      given: what it goes by.
      say: prints a line.
    """

    def __init__(
        self,
        engine: RunEngine,
        given: Supervision,
        *,
        say: Callable[[str], None] = print,
    ):
        self._engine, self._given, self._say = engine, given, say
        self._attempts: list[Attempt] = []
        self._furthest = -1
        self._was_asked = threading.Event()
        self._rates = Rates()

    def ask_to_stop(self) -> None:
        """The run is to save and end, and none is begun again."""
        # No more than that, within a handler: whoever looks on tells the processes, and only once.
        self._was_asked.set()

    def keep_going(self) -> int:
        """Runs to the end.

        Returns:
          0 when the run has all its steps; else the exit code of the last attempt.
        """
        while not self._was_asked.is_set():
            usable = self._usable()
            if len(usable) < self._given.policy.least_nodes:
                names = ", ".join(usable) or "none"
                reason = f"nodes that answer: {names}; the run needs {self._given.policy.least_nodes}"
                self._act(Decision(STOP, reason, page=True))
                return 1
            attempt = self._attempt(usable[: self._given.policy.nodes], usable)
            self._attempts.append(attempt)
            decision = decide(self._attempts, self._usable(), self._given.policy)
            self._act(decision)
            if decision.action in (DONE, STOP, REQUEUE) or self._given.dry_run:
                return attempt.code
        return self._attempts[-1].code if self._attempts else REQUEUE_CODE

    def _usable(self) -> list[str]:
        left_out = read_left_out(self._given.run_folder)
        return [node for node in self._engine.nodes() if node not in left_out]

    def _attempt(self, nodes: Sequence[str], usable: Sequence[str]) -> Attempt:
        """Runs all processes once, and says what is known of their end."""
        folder, began = self._given.run_folder, time.time()
        self._say(f"attempt {len(self._attempts) + 1} on {', '.join(nodes)}")
        ended = threading.Event()
        looking = threading.Thread(target=self._look_on, args=(began, nodes, usable, ended), daemon=True)
        looking.start()
        try:
            with self._engine.watching(nodes, folder):
                code = self._engine.run(nodes, self._hear)
        finally:
            ended.set()
            looking.join()
        newest, before = max(all_steps(folder), default=0), self._furthest
        self._furthest = max(newest, before)
        sightings = [each for each in read_sightings(folder, since=began) if each.host in nodes]
        return attempt_of(
            code,
            events_of(folder, since=began),
            nodes=nodes,
            sightings=sightings,
            newest_step=newest,
            has_progressed=newest > before,
            was_asked=self._was_asked.is_set(),
        )

    def _hear(self, host: str, line: str) -> None:
        """Keeps what a line of a process' complaints means, if that is known to mean anything."""
        rule = classify(self._given.rules, line)
        if rule is not None and self._rates.add(rule, time.time()):
            evidence = line.strip()[:400]
            sighting = Sighting(time.time(), host, rule.name, rule.action, "standard error", evidence)
            write_sighting(self._given.run_folder, sighting)

    def _look_on(
        self, began: float, nodes: Sequence[str], usable: Sequence[str], ended: threading.Event
    ) -> None:
        """Calls a human for what the run goes on with, and ends it in good order where a node must go."""
        told: set[str] = set()
        is_ending = False
        while not ended.wait(_LOOK_SECONDS):
            seen = read_sightings(self._given.run_folder, since=began)
            paged = {f"{each.host}: {each.name}": each.evidence for each in seen if each.action == "page"}
            for event in events_of(self._given.run_folder, since=began):
                if event["event"] == STARVED:
                    paged[str(event.get("reason"))] = f"at step {event.get('step')}"
            for what in paged.keys() - told:
                self._page(f"{what}: {paged[what]}", {"seen": what})
            told |= paged.keys()
            must_end = self._was_asked.is_set() or self._can_go_on_without(failing_nodes(seen, nodes), usable)
            # Once: told twice, the processes would leave without saving.
            if must_end and not is_ending:
                is_ending = True
                self._engine.tell(signal.SIGTERM)

    def _can_go_on_without(self, failing: Collection[str], usable: Sequence[str]) -> bool:
        """Whether nodes will fail, and the run has enough others."""
        enough = len(usable) - len(failing) >= self._given.policy.least_nodes
        return bool(failing) and enough and not self._given.dry_run

    def _act(self, decision: Decision) -> None:
        acted = not self._given.dry_run
        about = dataclasses.asdict(decision) | {"acted": acted}
        write_event(self._given.run_folder, DECIDED, **about)
        lost = f" ({decision.cost_seconds:,.0f} s)" if decision.cost_seconds else ""
        self._say(f"{'' if acted else 'dry run, would '}{decision.action}: {decision.reason}{lost}")
        for line in decision.evidence:
            self._say(f"  {line}")
        if not acted:
            return
        if decision.page:
            self._page(f"{decision.action}: {decision.reason}", about)
        if decision.action == LEAVE_OUT:
            self._leave_out(decision)
        if decision.action == REQUEUE:
            self._engine.requeue()
        if decision.wait_seconds:
            self._was_asked.wait(decision.wait_seconds)

    def _leave_out(self, decision: Decision) -> None:
        write_left_out(self._given.run_folder, decision.nodes)
        for node in decision.nodes:
            failure = self._engine.drain(node, decision.reason)
            if failure is not None:
                self._say(f"{node} is left out here, and not drained: {failure}")

    def _page(self, text: str, about: Mapping[str, Any]) -> None:
        if not self._given.dry_run:
            failure = page(f"run {self._given.run_folder}: {text}", about)
            if failure is not None:
                self._say(f"nobody was called: {failure}")


def attempt_of(
    code: int,
    events: Sequence[Mapping[str, Any]],
    *,
    nodes: Sequence[str],
    sightings: Sequence[Sighting] = (),
    newest_step: int,
    has_progressed: bool,
    was_asked: bool = False,
) -> Attempt:
    """What is known of an attempt.

    Args:
      code: with which it ended.
      events: of the run, since it began.
      nodes: that it ran on; what others are said to have done is no matter of this job.
      sightings: on its nodes.
      newest_step: of the run's checkpoints.
      has_progressed: as `Attempt`.
      was_asked: as `Attempt`.
    """
    named = {kind: [e.get("hosts", ()) for e in events if e["event"] == kind] for kind in (STALLED, DIVERGED)}
    lives = find_attempts(events)
    return Attempt(
        code=code,
        has_progressed=has_progressed,
        nodes=tuple(nodes),
        late=tuple(node for hosts in named[STALLED] for node in hosts if node in nodes),
        wrong=tuple(node for hosts in named[DIVERGED] for node in hosts if node in nodes),
        sightings=tuple(sightings),
        was_asked=was_asked,
        lost_seconds=redo_seconds(lives[-1], newest_step) if lives else 0.0,
    )


def failing_nodes(sightings: Sequence[Sighting], nodes: Sequence[str]) -> set[str]:
    """Nodes of an attempt that will fail by what was seen of them."""
    return {each.host for each in sightings if each.action == "drain" and each.host in nodes}


def read_left_out(run_folder: str) -> set[str]:
    """Nodes that a run is not to use again."""
    path = pathlib.Path(run_folder) / LEFT_OUT_FILE
    return set(path.read_text().split()) if path.is_file() else set()


def write_left_out(run_folder: str, nodes: Collection[str]) -> None:
    """Adds nodes to those that a run is not to use again."""
    pathlib.Path(run_folder).mkdir(parents=True, exist_ok=True)
    left_out = sorted(read_left_out(run_folder) | set(nodes))
    durable.write(pathlib.Path(run_folder) / LEFT_OUT_FILE, "".join(f"{node}\n" for node in left_out))
