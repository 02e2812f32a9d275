"""How an answer looks: thoughts dim on a terminal, marked in a pipe, or not shown at all."""

import re
from collections.abc import Callable

from zaya_jax.data.chat_template import THINK
from zaya_jax.inference.text import Piece

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What moves a cursor or colours a terminal; a network that has learned little writes any bytes."""


class AnswerScreen:
    """Writes one answer as its pieces come."""

    def __init__(self, write: Callable[[str], object], *, is_terminal: bool, shows_thoughts: bool):
        self._write, self._is_terminal, self._shows_thoughts = write, is_terminal, shows_thoughts
        self._is_thought = self._is_behind_hidden = False

    def show(self, piece: Piece) -> None:
        """Writes a piece, and nothing where it is of a thought that is hidden."""
        if piece.is_mark:
            self._pass_mark(piece.text)
        elif self._shows_thoughts or not self._is_thought:
            self._say(piece.text)

    def end(self) -> None:
        """Ends the answer's last line, also one that was interrupted."""
        if self._is_thought:
            self._dim(False)
        self._write("\n")

    def _pass_mark(self, mark: str) -> None:
        self._is_thought = mark == THINK
        self._is_behind_hidden = not self._shows_thoughts
        self._dim(self._is_thought)
        # Where nothing can be dim, only the marks tell a thought from the answer.
        if self._shows_thoughts and not self._is_terminal:
            self._write(mark)

    def _say(self, text: str) -> None:
        if self._is_behind_hidden:  # the empty lines between a thought and the answer
            text = text.lstrip()
            self._is_behind_hidden = not text
        self._write(_CONTROL.sub("", text) if self._is_terminal else text)

    def _dim(self, is_dim: bool) -> None:
        if self._is_terminal and self._shows_thoughts:
            self._write(_DIM if is_dim else _NOT_DIM)
