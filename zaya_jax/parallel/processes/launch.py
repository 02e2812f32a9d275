"""Starts several processes of a program on this machine and supervises them, as srun does on clusters."""

import contextlib
import dataclasses
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

from zaya_jax.errors import RESUMABLE, TIMED_OUT
from zaya_jax.parallel.processes.process_group import COORDINATOR, NUM_PROCESSES, PROCESS
from zaya_jax.platform.stop_signals import on_stop_signals

GRACE_SECONDS = 30.0
"""Time in seconds that processes have to exit after one of them has failed, before they are killed."""
_STALLED_GRACE_SECONDS = 3.0
_POLL_SECONDS = 0.05
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Launch:
    """A program and its number of processes.

    Attributes:
      command: command line of each process.
      num_processes: number of processes.
      devices: number of devices per process: emulated CPU devices, or GPUs of this machine; None to use the
        devices that jax finds.
      grace_seconds: see `GRACE_SECONDS`.
      hosts: name of the host of each process, as a scheduler would set it; empty for that of this machine.
    """

    command: Sequence[str]
    num_processes: int
    devices: int | None = None
    grace_seconds: float = GRACE_SECONDS
    hosts: Sequence[str] = ()


Line = Callable[[int, str], None]
"""Function that receives the number of a process and a line of its standard error."""


def launch(program: Launch, *, restarts: int = 0, final: Sequence[int] = (0,)) -> int:
    """Runs all processes until they exit; if one fails, the others are ended too.

    Args:
      program: program to run.
      restarts: maximum number of restarts after a failure.
      final: exit codes after which the processes are not restarted.

    Returns:
      0, or the exit code of the first process that failed; for a signal 128 plus its number, as in a shell.
    """
    for left in range(restarts, -1, -1):
        children = Children()
        # The processes agree among themselves on when to stop.
        with on_stop_signals(children.send):
            code = children.run(program)
        if code in final or not left:
            return code
        print(f"launch: exit code {code}; restarting, {left - 1} more restarts at most", file=sys.stderr)
    raise AssertionError("the last round returns")


class Children:
    """The processes of a run on this machine. Signals reach them while they run and while they start."""

    def __init__(self):
        self._running: list[subprocess.Popen[bytes]] = []
        self._signal: int | None = None

    def run(self, program: Launch, *, on_line: Line | None = None) -> int:
        """Runs all processes until they exit; if one fails, the others are ended too.

        Args:
          program: program to run.
          on_line: called with each line of the processes' standard error.

        Returns:
          The exit code, see `launch`.
        """
        coordinator = f"{_LOOPBACK}:{_free_port()}"
        self._running, self._signal = [], None
        for number in range(program.num_processes):
            self._running.append(_start(program, number, coordinator, captures=on_line is not None))
        # A signal that came during the loop has not reached the processes started after it.
        if self._signal is not None:
            self.send(self._signal)
        return _watch(program, self._running, on_line)

    def send(self, number: int) -> None:
        """Sends a signal to all processes that are running."""
        self._signal = number
        for child in self._running:
            child.send_signal(number)  # Popen ignores it for processes that have exited


def _watch(program: Launch, children: Sequence[subprocess.Popen[bytes]], on_line: Line | None) -> int:
    threads = [
        threading.Thread(target=_relay, args=(number, child.stderr, on_line), daemon=True)
        for number, child in enumerate(children)
        if child.stderr is not None
    ]
    for thread in threads:
        thread.start()
    failed = _wait(children, program.grace_seconds)
    for thread in threads:
        thread.join()  # all processes have exited, so that their streams end
    for number in find_causes(failed):
        # A process that a signal has ended leaves no message. In the words of srun.
        if failed[number] < 0:
            where = f"{program.hosts[number]}: " if program.hosts else ""
            line = f"launch: error: {where}process {number}: {signal.strsignal(-failed[number])}\n"
            sys.stderr.write(line)
            if on_line is not None:
                on_line(number, line)
    # jax aborts processes that lose process 0, maybe before process 0 itself has exited: such an abort is a
    # consequence of the failure, not its cause.
    codes = [code for code in failed.values() if code != -signal.SIGABRT]
    code = next(iter([*codes, *failed.values()]), 0)
    return 128 - code if code < 0 else code


def find_causes(failed: Mapping[int, int]) -> list[int]:
    """Returns the processes whose failures are not consequences of others.

    Args:
      failed: exit codes of the processes that failed by themselves, by number, in the order of their ends;
        minus the number of the signal that ended a process.
    """

    def rank(code: int) -> int:
        # A process that loses another one exits as resumable, or jax aborts it.
        return {RESUMABLE: 2, -signal.SIGABRT: 1}.get(code, 0)

    best = min(map(rank, failed.values()), default=0)
    causes = [number for number, code in failed.items() if rank(code) == best]
    return causes if best == 0 else causes[:1]


def _start(program: Launch, number: int, coordinator: str, *, captures: bool) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(program.num_processes),
        PROCESS: str(number),
        # A crash in compiled code then shows where each thread was.
        "PYTHONFAULTHANDLER": "1",
    }
    if program.devices is not None:
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={program.devices}"
        local = range(number * program.devices, (number + 1) * program.devices)
        environment |= {"XLA_FLAGS": flags.strip(), "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, local))}
    if program.hosts:
        # SLURM's name would precede it.
        environment.pop("SLURMD_NODENAME", None)
        environment["NODE_NAME"] = program.hosts[number]
    return subprocess.Popen(
        program.command,
        env=environment,
        # Process 0 prints for all; of the others only standard error is shown, with their number.
        stdout=None if number == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE if number or captures else None,
        # A terminal sends Ctrl-C to a whole process group. In their own groups the processes get it once,
        # from us.
        process_group=0,
    )


def _free_port() -> int:
    # Another program may take the port before process 0 binds it; that process then reports it.
    with contextlib.closing(socket.socket()) as probe:
        probe.bind((_LOOPBACK, 0))
        return probe.getsockname()[1]


def _relay(number: int, stream: BinaryIO | Any, on_line: Line | None) -> None:
    with stream:
        for line in stream:
            text = line.decode(errors="replace")
            sys.stderr.write(f"[{number}] {text}" if number else text)
            if on_line is not None:
                on_line(number, text)


def _wait(children: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> dict[int, int]:
    """Waits until all processes have exited, at most `grace_seconds` after the first failure.

    Returns:
      Exit codes of the processes that failed, by number, in the order of their ends, without those that
      were killed at the end of that time.
    """
    failed: dict[int, int] = {}
    deadline = math.inf
    is_over = False
    while not is_over:
        is_over = None not in [child.poll() for child in children]  # a list, so that every child is polled
        if time.monotonic() <= deadline:
            failed |= {n: child.returncode for n, child in enumerate(children) if child.returncode}
        if failed:
            # After a stall a process that has not exited by itself never will: it hangs in a collective.
            stalled = TIMED_OUT in failed.values()
            grace = min(grace_seconds, _STALLED_GRACE_SECONDS) if stalled else grace_seconds
            deadline = min(deadline, time.monotonic() + grace)
        # Killed in every round after the deadline; Popen ignores it for children that have exited.
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(_POLL_SECONDS)
    return failed
