"""The process of jax's coordination service: a child of process 0, whose work does not slow down training.

The service connects each process by itself, sends each the descriptions of all devices, and receives the
heartbeats of all. Process 0 starts this module as a program, which imports jaxlib without jax. It ends with
process 0: then the others lose the service, as they would if it were a part of process 0.
"""

import contextlib
import os
import resource
import select
import signal
import subprocess
import sys

from zaya_jax.errors import UserError

# A run stops by agreement of its processes, for which the service must outlast the signal to stop.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_POLL_SECONDS = 0.5
# Time in which the service ends after all processes have left it.
_END_SECONDS = 30.0


class ServiceProcess:
    """The process of jax's service, started and ended by process 0.

    Args:
      address: HOST:PORT at which the service will listen.
      num_processes: number of processes of the run.
      limit_seconds: time in seconds without a heartbeat after which it reports a process as lost, and for
        which it waits at the end for processes that have not left.
    """

    def __init__(self, address: str, num_processes: int, *, limit_seconds: float):
        self._address, self._limit_seconds = address, max(1, int(limit_seconds))
        arguments = (os.getpid(), address, num_processes, self._limit_seconds)
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, arguments)],
            # It must find the same packages, also those of a script that has changed its own path.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """The number of the process on its host."""
        return self._process.pid

    def listen(self) -> None:
        """Starts the service when its port is free, and waits until it listens.

        Raises:
          UserError: if it cannot listen at the address.
          RuntimeError: if it does not answer within the time limit.
        """
        assert self._process.stdout is not None
        self._request()
        has_answer, _, _ = select.select([self._process.stdout], [], [], self._limit_seconds)
        if not has_answer:
            raise RuntimeError(f"the process of jax's service did not answer for {self._limit_seconds} s")
        # If the service cannot bind its port, jaxlib crashes.
        if not self._process.stdout.readline():
            raise UserError(
                f"jax's service cannot listen at {self._address}: its process ended with exit code "
                f"{self._process.wait()}; if another program uses the port, choose another --coordinator"
            )

    def shutdown(self) -> None:
        """Ends the service after all processes have left it; jax calls it by this name."""
        self._request()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()

    def _request(self) -> None:
        """Sends the next request: the first one starts the service, and the second one ends it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, as its exit code will say
            self._process.stdin.write(b"\n")


def main(parent: int, address: str, num_processes: int, limit_seconds: int) -> None:
    """Runs the service from the first request of process 0 to the second one, or until process 0 has ended.

    Args:
      parent: number of process 0 on this host.
      address: see `ServiceProcess`.
      num_processes: see `ServiceProcess`.
      limit_seconds: see `ServiceProcess`.
    """
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # The import takes most of the start, and process 0 waits for the others meanwhile.
    from jaxlib import _jax  # pyright: ignore[reportAttributeAccessIssue]

    # A connection for each process; a shell often allows 1,024 open files.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _wait_for_request(parent)
    service = _jax.get_distributed_runtime_service(
        address, num_processes, heartbeat_timeout=limit_seconds, shutdown_timeout=limit_seconds
    )
    print("listening", flush=True)
    _wait_for_request(parent)
    service.shutdown()


def _wait_for_request(parent: int) -> None:
    """Waits for a request of process 0; ends this process if that one has ended."""
    # Its end does not close the pipe if a process that it has forked keeps it open.
    while os.getppid() == parent:
        if select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            if os.read(sys.stdin.fileno(), 1):
                return
            break
    # Without the destructor of the service, which would wait for the other processes.
    os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
