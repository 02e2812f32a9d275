"""The watchdog: ends a run that has stalled, after a report of where each of its processes is.

JAX notices a process that is gone, but not one whose main thread hangs while its own heartbeats continue: all
others wait for it in a collective, and the machines are idle. A thread of each process reads the heartbeats
of the main thread. The process that detects a timeout notifies the others. Each writes the stacks of its
threads, the first one reports which process is late, and all exit, so that the supervisor can restart them.
"""

import contextlib
import dataclasses
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from zaya_jax.config import WatchConfig
from zaya_jax.errors import TIMED_OUT
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import PeerLost, PeerTimeout
from zaya_jax.run_folder.events import events_of, write_event
from zaya_jax.run_folder.names import STALLED
from zaya_jax.train.heartbeats import COMPILE, DISPATCH, RESTORE, START, STEP, TASKS, Beat, Heartbeats
from zaya_jax.train.hooks.hook import Hook
from zaya_jax.train.setup import PreparedRun

_POLL_SECONDS = 1.0
_STALL = "zaya/stall"
_ANSWER_SECONDS = 10.0
"""Time for processes to report where they are."""
_POST_SECONDS = 5.0
"""Time for a message to reach the first process and to come back."""
T = TypeVar("T")


class Watchdog(Hook):
    """Ends a process that stalls: watches its heartbeats from the restore of its state to its exit."""

    def on_setup(self, run: PreparedRun, heartbeats: Heartbeats) -> None:
        """Starts to watch. Earlier waits have their own limits, and building a corpus may take a day."""
        self.start(run.config.watch, run.config.run_folder, heartbeats)

    def on_exit(self, error: BaseException | None) -> None:
        """Stops the watchdog when the run ends."""
        self.stop()

    def start(self, config: WatchConfig, run_folder: str, heartbeats: Heartbeats) -> None:
        """Starts the threads.

        Args:
          config: time limits.
          run_folder: folder whose `events.jsonl` records a stall.
          heartbeats: heartbeats of the main thread.
        """
        self._run_folder, self._heartbeats = run_folder, heartbeats
        self._stalls = StallDetector(config, heartbeats)
        self._closed = threading.Event()
        self._reason: str | None = None
        self._has_reason = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
            threading.Thread(target=self._listen, name="watchdog listener", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Stops the threads of the watchdog and waits for them."""
        self._closed.set()
        for thread in self._threads:
            # With a limit, because the listener may be in a call that never returns.
            thread.join(2 * _POLL_SECONDS)

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._has_reason.wait(_POLL_SECONDS)
            reason = self._reason
            if reason is None and (reason := self._stalls.check(time.monotonic())) is not None:
                reason = f"{hosts.describe(hosts.process())} {reason}"
                self._post(reason)
            # A run that has just finished must not be ended.
            if reason is not None and not self._closed.is_set():
                self._exit(reason)

    def _post(self, reason: str) -> None:
        """Notifies the other processes; says so if this one does not reach them."""
        if hosts.num_processes() == 1:
            return
        hosts.post(_STALL, reason)
        # Process 0 sends it to all, and so back to this process.
        if hosts.wait_for_post(_STALL, limit_seconds=_POST_SECONDS) is None:
            # If the others do, then the network of this host is at fault, which nobody else can see.
            _print(f"{hosts.describe(hosts.process())} does not reach process 0: it is stopped or cut off")

    def _listen(self) -> None:
        """Receives another process's reason, in its own thread: a stopped process never answers."""
        while hosts.num_processes() > 1 and not self._closed.is_set():
            reason = hosts.wait_for_post(_STALL, limit_seconds=_POLL_SECONDS)
            if reason is not None:
                self._reason = reason
                # This ends the wait of the other thread at once.
                self._has_reason.set()
                return

    def _exit(self, reason: str) -> None:
        try:
            self._report(reason)
        finally:
            # The main thread may be in a call that never returns: nothing gentler would reach it.
            os._exit(TIMED_OUT)

    def _report(self, reason: str) -> None:
        # The stacks come first: they need no other process.
        _print(f"the run has stalled: {reason}; threads of this process:")
        with contextlib.suppress(OSError, AttributeError):  # a notebook's standard error is no file
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)  # pyright: ignore[reportArgumentType]
        beat = self._heartbeats.beat
        # Time for the own message to arrive, and then for those of the others.
        answer = _within(_ANSWER_SECONDS + _POST_SECONDS, lambda: _late_processes(beat))
        no_answer = [0], f"late: {hosts.describe(0)}, which collects the answers and does not respond"
        # Without any answer, the first process is the late one: it collects the answers.
        late, sentence = no_answer if answer is None else answer
        # The first process writes the event, or the second one if the first does not respond, unless it has
        # done so: then it is the second one that is cut off.
        is_second = hosts.process() == 1 and answer is None and not self._is_reported()
        if hosts.is_first() or is_second:
            write_event(
                self._run_folder,
                STALLED,
                step=beat.made,
                seconds=self._heartbeats.seconds(),
                section=beat.section,
                still=self._stalls.seconds,
                reason=reason,
                late=sentence,
                hosts=[hosts.host_names()[number] for number in late],
            )
            _print(f"{sentence}; run the same command again to resume")

    def _is_reported(self) -> bool:
        """Returns whether an event of this stall exists."""
        since = time.time() - self._stalls.seconds
        return any(event["event"] == STALLED for event in events_of(self._run_folder, since=since))


def _within(seconds: float, work: Callable[[], T | None]) -> T | None:
    """Returns the result of `work`, or None if it takes longer; then it continues in its thread."""
    # A list, because a thread cannot return a value.
    result: list[T | None] = [None]

    def run() -> None:
        result[0] = work()

    # A daemon: it must not keep the process from exiting.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return result[0]


def _print(sentence: str) -> None:
    # Flushed, because `os._exit` does not write what is left in buffers.
    print(f"zaya: {sentence}", file=sys.stderr, flush=True)


class StallDetector:
    """Measures how long a process has been in its section, and compares that with the limit.

    Time during which the watchdog itself did not run does not count: after a machine has slept, or a process
    was stopped, it has not stalled.

    Args:
      config: time limits.
      heartbeats: heartbeats of the process.
    """

    def __init__(self, config: WatchConfig, heartbeats: Heartbeats):
        self._config, self._heartbeats = config, heartbeats
        self._count = -1
        self.seconds = 0.0
        """Time in the current section."""
        self._last_check: float | None = None

    def check(self, now: float) -> str | None:
        """Returns a description of the stall, or None. Call it about once per second."""
        beat = self._heartbeats.beat
        # Limited: a longer gap between two checks means that this thread did not run.
        passed = 0.0 if self._last_check is None else min(now - self._last_check, 10 * _POLL_SECONDS)
        self._last_check = now
        # A new section, or a new visit to the same one, is progress.
        if beat.count != self._count:
            self._count, self.seconds = beat.count, 0.0
            return None
        self.seconds += passed
        slowest = self._heartbeats.slowest(beat.section)
        limit = limit_of(self._config, beat, slowest)
        if limit is None or self.seconds <= limit:
            return None
        known = "" if slowest is None else f", and never took longer than {slowest:.1f} s"
        return f"is {beat} for {self.seconds:.0f} s{known}; the limit is {limit:.0f} s"


def _late_processes(beat: Beat) -> tuple[list[int], str] | None:
    """Returns the processes that the others wait for, and a sentence about them; None without answers."""
    if hosts.num_processes() == 1:
        return [0], f"the process is {beat}"
    # Messages between processes are JSON, which has no dataclasses.
    own = dataclasses.astuple(beat)
    try:
        answers = hosts.gather_available("stall", own, limit_seconds=_ANSWER_SECONDS)
    except (PeerTimeout, PeerLost):
        return None
    # Without processes whose answers pass a stopped one: they are not late themselves.
    beats = {number: None if answer is None else Beat(*answer) for number, answer in answers.items()}
    numbers = list(beats)
    late = [numbers[index] for index in find_late(list(beats.values()))]
    if not late:
        return [], f"all processes are {beat}: none of them is late, so a device or a link is"
    places = ", ".join(f"{hosts.describe(n)}, {_describe(beats[n])}" for n in late)
    others = next((p for n, p in beats.items() if p is not None and n not in late), None)
    return late, f"late: {places}" + ("" if others is None else f"; the others wait {others}")


def _describe(beat: Beat | None) -> str:
    return "which does not respond" if beat is None else str(beat)


def limit_of(config: WatchConfig, beat: Beat, slowest: float | None) -> float | None:
    """Returns the time limit of a visit to a section in seconds; None without a limit.

    Args:
      config: time limits of the run.
      beat: the visit.
      slowest: duration of the slowest recent visit; None if there were too few.
    """
    limit = getattr(config, f"{STEP if beat.section == DISPATCH else beat.section}_seconds")
    if limit is not None:
        # The limit in the config is that of one step.
        limit *= beat.num_steps
    # Not adaptive: each phase compiles a new program, which may be larger than earlier ones, and a round of
    # tasks may have more of them than earlier rounds.
    if limit is None or slowest is None or beat.section in (START, RESTORE, COMPILE, TASKS):
        return limit
    return min(limit, max(config.min_seconds, config.timeout_factor * slowest))


def find_late(beats: Sequence[Beat | None]) -> list[int]:
    """Returns the processes that the others wait for: those without an answer, or else the latest ones.

    Args:
      beats: beat of each process; None for processes without an answer.

    Returns:
      Process numbers; empty if all processes are at the same place.
    """
    # A process without an answer is stopped or gone, which explains why others wait.
    silent = [number for number, beat in enumerate(beats) if beat is None]
    if silent:
        return silent
    # All processes enter the same sections in the same order: the lowest count is the latest process.
    counts = [beat.count for beat in beats if beat is not None]
    if min(counts) == max(counts):
        return []
    return [number for number, count in enumerate(counts) if count == min(counts)]
