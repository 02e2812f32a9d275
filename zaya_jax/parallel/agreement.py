"""At which step all processes of a run stop, whichever of them was asked to."""

import threading
from typing import Any

from zaya_jax.parallel import hosts
from zaya_jax.parallel.failures import Late

_PROPOSAL = "zaya/stop"
_LISTEN_SECONDS = 1.0


class Agreement:
    """Has all processes stop behind the same step, for the word of any of them. Use it as a context.

    One that stopped alone would leave the others waiting in the next step's collective. So a thread
    listens in each process. When it hears the word, it holds its main thread where that is and tells how
    far it has come; all stop at the first step that nobody has passed. No device waits for this.
    """

    def __init__(self):
        self._word: str | None = None
        self._stop_at = 0
        self._step = 0
        self._failure: Late | None = None
        # Whoever holds it, the loop cannot pass a step.
        self._passing = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="agreement", daemon=True)

    def __enter__(self) -> "Agreement":
        if hosts.num_processes() > 1:
            self._thread.start()
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if hosts.num_processes() == 1:
            return
        if kind is None:  # all at one step: until then a word of another may come, which needs an answer
            hosts.gather("end of the steps", None)
        self._closed.set()
        self._thread.join(2 * _LISTEN_SECONDS)

    def propose(self, word: str) -> None:
        """Asks all processes to stop; of several words the first one counts."""
        if hosts.num_processes() == 1:
            self._word = self._word or word
        else:
            hosts.say_once(_PROPOSAL, word)

    def reached(self, step: int) -> str | None:
        """The word for which all stop behind a step; None where they go on. To be asked at each step.

        Raises:
          Late: if the others were asked how far they are, and some gave no answer.
        """
        with self._passing:
            self._step = step
            if self._failure is not None:
                raise self._failure
            return self._word if step >= self._stop_at else None

    def _listen(self) -> None:
        while not self._closed.is_set():
            word = hosts.heard(_PROPOSAL, limit_seconds=_LISTEN_SECONDS)
            if word is not None:
                with self._passing:
                    self._agree(word)
                return

    def _agree(self, word: str) -> None:
        try:
            self._stop_at = max(hosts.gather("stop", self._step)) + 1
        except Late as error:  # in a thread nobody would hear it
            self._failure = error
        self._word = word
