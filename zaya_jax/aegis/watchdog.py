"""Ends a run that stands still, behind a word on where each of its processes stands.

JAX notices a process that is gone, and never one whose main thread hangs while its heartbeats go on: all
others wait for it in a collective, and the machines are paid for. A thread beside the main one looks at its
heartbeats. Whichever process finds a limit passed tells the others; each writes the stacks of its threads,
the first one says who is late, and all end, for whoever began them to begin anew.
"""

import contextlib
import dataclasses
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from zaya_jax.aegis.heartbeats import Beat, Heartbeats, find_late, limit_of
from zaya_jax.aegis.journal import STALLED, write_event
from zaya_jax.config import WatchConfig
from zaya_jax.parallel import hosts
from zaya_jax.parallel.failures import Late
from zaya_jax.parallel.launch import STILL

_LOOK_SECONDS = 1.0
_STALL = "zaya/stall"
_ANSWER_SECONDS = 10.0
"""That processes have to say where they stand."""
_SAY_SECONDS = 5.0
"""That a word may take to the first process, behind which it is stopped itself."""
T = TypeVar("T")


class Watchdog:
    """Looks at the heartbeats of this process. Use it as a context.

    Args:
      config: of the run.
      run_folder: in which the end is written down.
      heartbeats: of the main thread.
    """

    def __init__(self, config: WatchConfig, run_folder: str, heartbeats: Heartbeats):
        self._run_folder, self._heartbeats = run_folder, heartbeats
        self._stillness = Stillness(config, heartbeats)
        self._closed = threading.Event()
        self._word: str | None = None
        self._heard = threading.Event()
        self._threads = [
            threading.Thread(target=self._watch, name="watchdog", daemon=True),
            threading.Thread(target=self._listen, name="watchdog's ear", daemon=True),
        ]

    def __enter__(self) -> "Watchdog":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._closed.set()
        for thread in self._threads:
            thread.join(2 * _LOOK_SECONDS)

    def _watch(self) -> None:
        while not self._closed.is_set():
            self._heard.wait(_LOOK_SECONDS)
            reason = self._word
            if reason is None and (reason := self._stillness.look(time.monotonic())) is not None:
                reason = f"{hosts.describe(hosts.process())} {reason}"
                if hosts.num_processes() > 1:
                    _within(_SAY_SECONDS, lambda word=reason: hosts.say_once(_STALL, word))
            if reason is not None and not self._closed.is_set():
                self._end(reason)

    def _listen(self) -> None:
        """Hears what another has found; apart, for the word of a process that is stopped never comes."""
        while hosts.num_processes() > 1 and not self._closed.is_set():
            word = hosts.heard(_STALL, limit_seconds=_LOOK_SECONDS)
            if word is not None:
                self._word = word
                self._heard.set()
                return

    def _end(self, reason: str) -> None:
        try:
            self._tell(reason)
        finally:
            # The main thread may be in a call that never returns: nothing gentler would reach it.
            os._exit(STILL)

    def _tell(self, reason: str) -> None:
        # First: whatever happens to the words of others, where this process stood is known.
        _say(f"the run stands still: {reason}; threads of this process:")
        with contextlib.suppress(OSError, AttributeError):  # a notebook's standard error is no file
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)  # pyright: ignore[reportArgumentType]
        beat = self._heartbeats.beat
        found = _within(_ANSWER_SECONDS + _SAY_SECONDS, lambda: _who_is_late(beat))
        silent = [0], f"late: {hosts.describe(0)}, which collects the answers and gives none"
        late, sentence = silent if found is None else found
        # The first one writes, and the second where the first says nothing.
        if hosts.is_first() or (hosts.process() == 1 and found is None):
            write_event(
                self._run_folder,
                STALLED,
                step=beat.made,
                seconds=self._heartbeats.seconds(),
                section=beat.section,
                still=self._stillness.seconds,
                reason=reason,
                late=sentence,
                hosts=[hosts.names()[number] for number in late],
            )
            _say(f"{sentence}; the same command goes on")


def _within(seconds: float, work: Callable[[], T | None]) -> T | None:
    """What some work gives, or None where it is not done in time: it goes on, and nobody waits for it.

    What processes say goes through the first one; where that is stopped, as by SIGSTOP, no call comes back.
    """
    found: list[T | None] = [None]

    def run() -> None:
        found[0] = work()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0]


def _say(sentence: str) -> None:
    print(f"zaya: {sentence}", file=sys.stderr, flush=True)


class Stillness:
    """For how long a process has been in a section, and whether that is too long.

    Time in which the watch itself did not run does not count: a machine that slept, or a process that was
    stopped, has not stood still.

    Args:
      config: of the run.
      heartbeats: of the process.
    """

    def __init__(self, config: WatchConfig, heartbeats: Heartbeats):
        self._config, self._heartbeats = config, heartbeats
        self._count = -1
        self.seconds = 0.0
        """In the section that the process is in."""
        self._looked: float | None = None

    def look(self, now: float) -> str | None:
        """What is too long, in words, if anything is; to be asked every second or so."""
        beat = self._heartbeats.beat
        passed = 0.0 if self._looked is None else min(now - self._looked, 10 * _LOOK_SECONDS)
        self._looked = now
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


def _who_is_late(beat: Beat) -> tuple[list[int], str] | None:
    """Which processes the others wait for, and a sentence; None where the first one collects no answers."""
    if hosts.num_processes() == 1:
        return [0], f"the process is {beat}"
    own = dataclasses.astuple(beat)
    try:
        answers = hosts.answers("stall", own, limit_seconds=_ANSWER_SECONDS)
    except (Late, jax.errors.JaxRuntimeError):
        return None
    beats = [None if answer is None else Beat(*answer) for answer in answers]
    late = find_late(beats)
    if not late:
        return [], f"all processes are {beat}: none of them is late, so a device or a link is"
    told = ", ".join(f"{hosts.describe(n)}, {_describe(beats[n])}" for n in late)
    others = next((p for n, p in enumerate(beats) if p is not None and n not in late), None)
    return late, f"late: {told}" + ("" if others is None else f"; the others wait {others}")


def _describe(beat: Beat | None) -> str:
    return "which gives no answer" if beat is None else str(beat)
