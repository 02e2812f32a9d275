"""Displays an answer: thoughts are dim on a terminal, between marks in a pipe, or hidden."""

import re
from collections.abc import Callable

from zaya_jax.data.chats.templates.template import THINK
from zaya_jax.inference.engine.text_stream import Piece

_DIM, _NOT_DIM = "\x1b[2m", "\x1b[22m"
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Control characters, which move the cursor or color a terminal. An untrained model generates any bytes."""


class AnswerScreen:
    """Writes one answer as its pieces arrive."""

    def __init__(self, write: Callable[[str], object], *, is_terminal: bool, shows_thoughts: bool):
        self._write, self._is_terminal, self._shows_thoughts = write, is_terminal, shows_thoughts
        self._is_thought = self._skips_space = False

    def show(self, piece: Piece) -> None:
        """Writes a piece, unless it belongs to a hidden thought."""
        if piece.is_mark:
            self._handle_mark(piece.text)
        elif self._shows_thoughts or not self._is_thought:
            self._write_text(piece.text)

    def end(self) -> None:
        """Ends the last line, also of an interrupted answer."""
        if self._is_thought:
            self._set_dim(False)
        self._write("\n")

    def _handle_mark(self, mark: str) -> None:
        self._is_thought = mark == THINK
        # Templates put empty lines around a thought; without the thought they would be at the start of the
        # answer.
        self._skips_space = not self._shows_thoughts
        self._set_dim(self._is_thought)
        # A pipe cannot be dim: only the marks separate a thought from the answer.
        if self._shows_thoughts and not self._is_terminal:
            self._write(mark)

    def _write_text(self, text: str) -> None:
        if self._skips_space:  # the empty lines between a hidden thought and the answer
            text = text.lstrip()
            self._skips_space = not text
        self._write(_CONTROL.sub("", text) if self._is_terminal else text)

    def _set_dim(self, is_dim: bool) -> None:
        if self._is_terminal and self._shows_thoughts:
            self._write(_DIM if is_dim else _NOT_DIM)
