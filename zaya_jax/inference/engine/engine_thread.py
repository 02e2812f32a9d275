"""A thread that steps an engine."""

import logging
import threading

from zaya_jax.inference.engine.engine import Engine

MAX_STEP_SECONDS = 600.0
"""Limit of one step when the thread is stopped, compilation included."""
_LOG = logging.getLogger(__name__)


class EngineThread:
    """Steps an engine while it has work, and sleeps otherwise. Use it as a context manager.

    Attributes:
      error: exception that ended the engine, or None. All requests fail with it, and later ones are rejected.
    """

    def __init__(self, engine: Engine):
        self._engine = engine
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.error: Exception | None = None

    def __enter__(self) -> "EngineThread":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stops the thread after its current step, and cancels all requests."""
        # A step cannot be interrupted: the device would still write into the donated cache.
        self._stop.set()
        self._thread.join(MAX_STEP_SECONDS)
        if self._thread.is_alive():
            raise TimeoutError(f"the engine's thread has been in one step for {MAX_STEP_SECONDS} s")
        if self.error is None:
            self._engine.end()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                # Wake up ten times per second, to see that the thread is to stop.
                if self._engine.wait_for_work(0.1):
                    self._engine.step()
        except Exception as error:  # an error of the device: the donated cache is lost, and all texts with it
            _LOG.exception("the engine has ended")
            self.error = error
            self._engine.end(error)
