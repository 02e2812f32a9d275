"""The supervisor of a job: starts the processes of a run, decides after each failure, and acts.

Each decision is recorded as an event of the run, with its reason, evidence, action and cost.
"""

import dataclasses
import pathlib
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.agent.log_rules import LogRule, Rates, classify
from zaya_jax.aegis.agent.sightings import Sighting, read_sightings, write_sighting
from zaya_jax.aegis.supervisor.diagnosis import diagnose
from zaya_jax.aegis.supervisor.engines import RunEngine
from zaya_jax.aegis.supervisor.restart_policy import (
    DONE,
    EXCLUDE,
    REQUEUE,
    STOP,
    Attempt,
    Decision,
    RestartPolicy,
    decide,
)
from zaya_jax.aegis.supervisor.webhook import page
from zaya_jax.aegis.views.goodput import redo_seconds
from zaya_jax.checkpoint import all_steps
from zaya_jax.errors import RESUMABLE
from zaya_jax.files import durable
from zaya_jax.run_folder.events import events_of, write_event
from zaya_jax.run_folder.names import DECIDED, DIVERGED, EXCLUDED_NODES_FILE, RESTORED, STARVED

_POLL_SECONDS = 1.0


class Supervisor:
    """Runs attempts until the run is complete or a human must decide.

    Args:
      engine: starts the processes.
      run_folder: folder of the run.
      rules: classes of lines on the processes' standard error.
      policy: limits of its decisions.
      dry_run: whether to run one attempt, and only print the decision after it.
      report: prints a line.
    """

    def __init__(
        self,
        engine: RunEngine,
        run_folder: str,
        rules: Sequence[LogRule],
        policy: RestartPolicy,
        *,
        dry_run: bool = False,
        report: Callable[[str], None] = print,
    ):
        self._engine, self._folder, self._rules, self._policy = engine, run_folder, rules, policy
        self._dry_run, self._report = dry_run, report
        self._attempts: list[Attempt] = []
        self._furthest = -1
        self._stop_requested = threading.Event()
        self._rates = Rates()

    def request_stop(self) -> None:
        """Requests the run to save and end, without another attempt. May be called from a signal handler."""
        # Only sets a flag: the monitoring thread signals the processes, and does so only once.
        self._stop_requested.set()

    def run(self) -> int:
        """Runs attempts until a decision ends the run.

        Returns:
          0 if the run is complete; else the exit code of the last attempt.
        """
        while not self._stop_requested.is_set():
            usable = self._usable_nodes()
            if len(usable) < self._policy.min_nodes:
                names = ", ".join(usable) or "none"
                reason = f"nodes that respond: {names}; the run needs {self._policy.min_nodes}"
                self._act(Decision(STOP, reason, page=True))
                return 1
            # The other nodes are spare, for attempts after this one.
            attempt = self._run_attempt(usable[: self._policy.nodes], usable)
            self._attempts.append(attempt)
            # The nodes are queried again: some may have failed or been drained during the attempt.
            decision = decide(self._attempts, self._usable_nodes(), self._policy)
            self._act(decision)
            if decision.action in (DONE, STOP, REQUEUE) or self._dry_run:
                return attempt.code
        # A stop before the first attempt leaves a run that can be resumed.
        return self._attempts[-1].code if self._attempts else RESUMABLE

    def _usable_nodes(self) -> list[str]:
        excluded = read_excluded_nodes(self._folder)
        return [node for node in self._engine.nodes() if node not in excluded]

    def _run_attempt(self, nodes: Sequence[str], usable: Sequence[str]) -> Attempt:
        """Runs all processes once, and collects what is known about their end."""
        began = time.time()
        self._report(f"attempt {len(self._attempts) + 1} on {', '.join(nodes)}")
        ended = threading.Event()
        # In a separate thread, because this one is busy with the output of the processes.
        monitor = threading.Thread(target=self._monitor, args=(began, nodes, usable, ended), daemon=True)
        monitor.start()
        try:
            with self._engine.watching(nodes, self._folder):
                code = self._engine.run(nodes, self._on_stderr_line)
        finally:
            ended.set()
            monitor.join()
        events = events_of(self._folder, since=began)
        # A restart repeats steps: only a checkpoint later than all previous ones is progress, or copies in
        # memory that an attempt starts from.
        restored = (event["step"] for event in events if event["event"] == RESTORED)
        newest, previous = max([*all_steps(self._folder), *restored], default=0), self._furthest
        self._furthest = max(newest, previous)
        # Sightings on other nodes say nothing about this attempt.
        sightings = [each for each in read_sightings(self._folder, since=began) if each.host in nodes]
        return Attempt(
            code,
            has_progressed=newest > previous,
            nodes=tuple(nodes),
            diagnosis=diagnose(events, sightings, nodes),
            diverged=_named_in(DIVERGED, events, nodes),
            sightings=tuple(sightings),
            stop_requested=self._stop_requested.is_set(),
            lost_seconds=redo_seconds(events, newest),
        )

    def _on_stderr_line(self, host: str, line: str) -> None:
        """Records a line of a process' standard error, if a rule has a class for it."""
        rule = classify(self._rules, line)
        if rule is not None and self._rates.add(rule, time.time()):
            evidence = line.strip()[:400]
            sighting = Sighting(time.time(), host, rule.name, rule.action, "standard error", evidence)
            write_sighting(self._folder, sighting)

    def _monitor(
        self, began: float, nodes: Sequence[str], usable: Sequence[str], ended: threading.Event
    ) -> None:
        """Notifies a human during an attempt, and ends the attempt when a node is about to fail."""
        notified: set[str] = set()
        is_ending = False
        while not ended.wait(_POLL_SECONDS):
            sightings = read_sightings(self._folder, since=began)
            alerts = {
                f"{each.host}: {each.name}": each.evidence for each in sightings if each.action == "page"
            }
            for event in events_of(self._folder, since=began):
                if event["event"] == STARVED:
                    alerts[str(event.get("reason"))] = f"at step {event.get('step')}"
            # An alert stays in the files, and is sent once in each attempt.
            for alert in alerts.keys() - notified:
                self._page(f"{alert}: {alerts[alert]}", {"seen": alert})
            notified |= alerts.keys()
            failing = failing_nodes(sightings, nodes)
            # Once: at a second signal the processes would exit without saving.
            if not is_ending and (self._stop_requested.is_set() or self._can_replace(failing, usable)):
                is_ending = True
                self._engine.send_signal(signal.SIGTERM)

    def _can_replace(self, failing: Collection[str], usable: Sequence[str]) -> bool:
        """Whether nodes are about to fail, and enough others are usable."""
        enough = len(usable) - len(failing) >= self._policy.min_nodes
        return bool(failing) and enough and not self._dry_run

    def _act(self, decision: Decision) -> None:
        acted = not self._dry_run
        values = dataclasses.asdict(decision) | {"acted": acted}
        # Recorded before it is carried out, in case that the supervisor itself is killed meanwhile.
        write_event(self._folder, DECIDED, **values)
        cost = f" ({decision.cost_seconds:,.0f} s)" if decision.cost_seconds else ""
        self._report(f"{'' if acted else 'dry run, would '}{decision.action}: {decision.reason}{cost}")
        for line in decision.evidence:
            self._report(f"  {line}")
        if not acted:
            return
        if decision.page:
            self._page(f"{decision.action}: {decision.reason}", values)
        if decision.action == EXCLUDE:
            self._exclude(decision)
        if decision.action == REQUEUE:
            self._engine.requeue()
        # Ends early when a stop is requested.
        if decision.wait_seconds:
            self._stop_requested.wait(decision.wait_seconds)

    def _exclude(self, decision: Decision) -> None:
        write_excluded_nodes(self._folder, decision.nodes)
        for node in decision.nodes:
            failure = self._engine.drain(node, decision.reason)
            # This run does not use the node again in any case; other jobs still may.
            if failure is not None:
                self._report(f"{node} is excluded from this run, but could not be drained: {failure}")

    def _page(self, text: str, values: Mapping[str, Any]) -> None:
        if not self._dry_run:
            failure = page(f"run {self._folder}: {text}", values)
            if failure is not None:
                self._report(f"no webhook was called: {failure}")


def _named_in(kind: str, events: Sequence[Mapping[str, Any]], nodes: Sequence[str]) -> tuple[str, ...]:
    """Returns the nodes of an attempt that events of a kind name; other hosts belong to other jobs."""
    hosts = (host for event in events if event["event"] == kind for host in event.get("hosts", ()))
    return tuple(host for host in hosts if host in nodes)


def failing_nodes(sightings: Sequence[Sighting], nodes: Sequence[str]) -> set[str]:
    """Returns the nodes of an attempt that have a sighting with the action "drain"."""
    return {each.host for each in sightings if each.action == "drain" and each.host in nodes}


def read_excluded_nodes(run_folder: str) -> set[str]:
    """Returns the nodes that a run must not use again."""
    path = pathlib.Path(run_folder) / EXCLUDED_NODES_FILE
    return set(path.read_text().split()) if path.is_file() else set()


def write_excluded_nodes(run_folder: str, nodes: Collection[str]) -> None:
    """Adds nodes to those that a run must not use again."""
    pathlib.Path(run_folder).mkdir(parents=True, exist_ok=True)
    excluded = sorted(read_excluded_nodes(run_folder) | set(nodes))
    # Durable: a later job must not use a faulty node again after a crash of this one.
    durable.write(pathlib.Path(run_folder) / EXCLUDED_NODES_FILE, "".join(f"{node}\n" for node in excluded))
