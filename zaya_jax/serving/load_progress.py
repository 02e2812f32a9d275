"""Progress of `zaya serve` while it loads its model: a line per step, with the time since the start."""

import sys
import threading
import time
from typing import Any

from zaya_jax.inference.engine.engine import Engine
from zaya_jax.inference.engine.prompt_scores import PromptScorer

QUIET_SECONDS = 5.0
"""Time before the first line: a mistake in the options ends loading sooner, with only its error message."""


class LoadProgress:
    """Context manager that prints the steps of loading a model to standard error.

    Standard output contains only the URL of the server, so that scripts can read it.
    """

    def __init__(self, first_step: str):
        """Starts the clock.

        Args:
          first_step: description of the first step, printed if it takes a while.
        """
        self._start = time.monotonic()
        self._timer = threading.Timer(QUIET_SECONDS, self._print, (first_step,))
        # A failed start must not wait for the timer.
        self._timer.daemon = True

    def __enter__(self) -> "LoadProgress":
        self._timer.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._timer.cancel()

    def report(self, message: str) -> None:
        """Prints a line with the time since the start."""
        # The first report replaces the delayed line.
        self._timer.cancel()
        self._print(message)

    def compile(self, engine: Engine, scorer: PromptScorer, *, with_masks: bool) -> None:
        """Compiles every program that a request can need, and prints a line before each.

        Args:
          engine: engine that generates texts.
          scorer: scorer of prompts.
          with_masks: whether answers can be constrained.
        """
        # Compiling now keeps the first requests from waiting for a compiler for minutes.
        programs = engine.programs(with_masks=with_masks) | {"scores of a prompt": scorer.warm_up}
        for number, (name, run) in enumerate(programs.items(), 1):
            self.report(f"compiling program {number} of {len(programs)}: {name}")
            run()
        self.report(f"all {len(programs)} programs are compiled")

    def _print(self, message: str) -> None:
        print(f"[{time.monotonic() - self._start:6.1f} s] {message}", file=sys.stderr, flush=True)
