"""Agreement of all processes of a run on the step after which they stop."""

import threading
from typing import Any

from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.errors import PeerLost, PeerTimeout

_PROPOSAL = "zaya/stop"
_POLL_SECONDS = 1.0


def request_stop(request: str) -> None:
    """Requests all processes to stop; the first of several requests counts."""
    hosts.post(_PROPOSAL, request)


def wait_for_request(*, limit_seconds: float) -> str | None:
    """Waits until any process requests to stop; returns None if none does within the time limit."""
    return hosts.wait_for_post(_PROPOSAL, limit_seconds=limit_seconds)


def agree_on_step(step: int) -> int:
    """Returns the first step that no process has passed, given the step of this one. All must call it."""
    # A process may already be within the step after the last one that it has completed.
    return hosts.reduce("stop", step, max) + 1


class StopAgreement:
    """Makes all processes stop after the same step when any of them requests it. Use it as a context manager.

    A process that stopped alone would leave the others waiting in the collectives of the next step. So a
    thread in each process waits for a request. When it receives one, it pauses its main thread before the
    next step and sends its current step; all processes stop after the first step that no process has passed.
    The devices do not wait for this.
    """

    def __init__(self):
        self._request: str | None = None
        self._stop_at = 0
        self._step = 0
        self._failure: PeerTimeout | PeerLost | None = None
        # While a thread holds it, the training loop cannot begin another step.
        self._passing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._wait_for_request, name="stop agreement", daemon=True)

    def __enter__(self) -> "StopAgreement":
        if hosts.num_processes() > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if hosts.num_processes() == 1:
            return
        # Wait for all processes to end their steps: until then a request may come, which all must answer.
        if kind is None:
            hosts.meet("end of the steps")
        self._closed.set()
        self._thread.join(2 * _POLL_SECONDS)

    def propose(self, request: str) -> None:
        """Requests all processes to stop.

        Args:
          request: reason, which `reached` returns in all processes; the first of several requests counts.
        """
        if hosts.num_processes() == 1:
            self._request = self._request or request
        else:
            request_stop(request)

    def reached(self, step: int) -> str | None:
        """Returns the request for which all processes stop after a step; None to continue.

        Must be called after each step.

        Raises:
          PeerTimeout: if some processes did not answer a request in time.
        """
        with self._passing:
            self._step = step
            if self._failure is not None:
                raise self._failure
            return self._request if step >= self._stop_at else None

    def _wait_for_request(self) -> None:
        while not self._closed.is_set():
            request = wait_for_request(limit_seconds=_POLL_SECONDS)
            if request is not None:
                with self._passing:
                    self._agree(request)
                return

    def _agree(self, request: str) -> None:
        try:
            self._stop_at = agree_on_step(self._step)
        # Raised in the main thread: in this one nothing would handle it.
        except (PeerTimeout, PeerLost) as error:
            self._failure = error
        self._request = request
