"""Several processes of one program on this machine, watched: what srun and a JobSet do on a cluster."""

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
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, BinaryIO

from zaya_jax.parallel.process_group import COORDINATOR, NUM_PROCESSES, PROCESS

GRACE_SECONDS = 30.0
"""That processes have to leave when one of them has failed, before they are killed."""
STILL = 124
"""The exit code of a process that found its run to stand still, as coreutils' `timeout` has it."""
_STILL_SECONDS = 3.0
_POLL_SECONDS = 0.05
_LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True)
class Launch:
    """What is to run.

    Attributes:
      command: the words of each process' command line.
      num_processes: how many run together.
      devices: of each process: CPU devices that are made for it, or its share of the GPUs; None for what
        it finds.
      grace_seconds: as `GRACE_SECONDS`.
    """

    command: Sequence[str]
    num_processes: int
    devices: int | None = None
    grace_seconds: float = GRACE_SECONDS


Line = Callable[[int, str], None]
"""Takes the number of a process, and a line of its standard error."""


def launch(given: Launch, *, restarts: int = 0, final: Sequence[int] = (0,)) -> int:
    """Runs all processes to their end; if one fails, the others are ended too.

    Args:
      given: what is to run.
      restarts: how often all are begun anew when one has failed.
      final: exit codes after which nothing is begun anew.

    Returns:
      0, or the exit code of the first that failed, as a shell has it: 128 and the signal that ended it.
    """
    for left in range(restarts, -1, -1):
        children = Children()
        with _forwarding(children):
            code = children.run(given)
        if code in final or not left:
            return code
        print(f"launch: exit code {code}; beginning anew, {left - 1} times more at most", file=sys.stderr)
    raise AssertionError("the last round returns")


class Children:
    """The processes of a run on this machine, which a signal reaches while they run, and while they start."""

    def __init__(self):
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked: int | None = None

    def run(self, given: Launch, *, on_line: Line | None = None) -> int:
        """Runs all to their end; if one fails, the others are ended too.

        Args:
          given: what is to run.
          on_line: is told what they say on their standard error.

        Returns:
          As `launch`.
        """
        coordinator = f"{_LOOPBACK}:{_free_port()}"
        self._running, self._asked = [], None
        for number in range(given.num_processes):
            self._running.append(_start(given, number, coordinator, is_heard=on_line is not None))
        if self._asked is not None:  # while they were being started: some have not heard it
            self.send(self._asked)
        return _watch(given, self._running, on_line)

    def send(self, number: int) -> None:
        """Passes a signal on to all."""
        self._asked = number
        for child in self._running:
            child.send_signal(number)  # Popen leaves out those that have ended


def _watch(given: Launch, children: Sequence[subprocess.Popen[bytes]], on_line: Line | None) -> int:
    threads = [
        threading.Thread(target=_relay, args=(number, child.stderr, on_line), daemon=True)
        for number, child in enumerate(children)
        if child.stderr is not None
    ]
    for thread in threads:
        thread.start()
    code = _wait(children, given.grace_seconds)
    for thread in threads:
        thread.join()  # all have ended, so that no more can come
    return code


def _start(given: Launch, number: int, coordinator: str, *, is_heard: bool) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        COORDINATOR: coordinator,
        NUM_PROCESSES: str(given.num_processes),
        PROCESS: str(number),
    }
    if given.devices is not None:
        flags = f"{environment.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={given.devices}"
        local = range(number * given.devices, (number + 1) * given.devices)
        environment |= {"XLA_FLAGS": flags.strip(), "JAX_LOCAL_DEVICE_IDS": ",".join(map(str, local))}
    return subprocess.Popen(
        given.command,
        env=environment,
        # The first one speaks for all; of the others only what they complain of is heard.
        stdout=None if number == 0 else subprocess.DEVNULL,
        stderr=subprocess.PIPE if number or is_heard else None,
        # Ctrl-C in a terminal goes to all of its group: through us alone each process hears it once.
        process_group=0,
    )


def _free_port() -> int:
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


@contextlib.contextmanager
def _forwarding(children: Children) -> Iterator[None]:
    """Passes on to all processes what this one is asked: they know how to stop together."""

    def forward(number: int, frame: FrameType | None) -> None:
        del frame
        children.send(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]], grace_seconds: float) -> int:
    """Waits for all; the code of the first that failed, behind which the others get their grace."""
    failed: dict[int, int] = {}
    deadline = math.inf
    is_over = False
    while not is_over:
        is_over = None not in [child.poll() for child in children]  # a list: each must be asked
        failed |= {n: child.returncode for n, child in enumerate(children) if child.returncode}
        if failed:
            # Behind a stall who has not ended by itself never will.
            grace = min(grace_seconds, _STILL_SECONDS) if STILL in failed.values() else grace_seconds
            deadline = min(deadline, time.monotonic() + grace)
        if time.monotonic() > deadline:
            for child in children:
                child.kill()
        time.sleep(_POLL_SECONDS)
    # jax aborts whoever misses process 0, perhaps before that one has ended: no cause, but what followed.
    causes = [code for code in failed.values() if code != -signal.SIGABRT]
    code = next(iter([*causes, *failed.values()]), 0)
    return 128 - code if code < 0 else code
