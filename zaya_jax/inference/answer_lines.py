"""Answers as JSON lines: kept as batches are done, and given their place, in order, when all are there."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax import durable
from zaya_jax.json_files import parse_object

UNFINISHED = ".unfinished"
"""Ends the name of the file beside the answers' place that has those which are done, in any order."""


class AnswerLines:
    """The answers to one file of prompts.

    Attributes:
      done: answers by the numbers of their lines.
      num_found: of those, how many an earlier process left.
    """

    def __init__(self, path: str, fingerprint: str):
        """Takes up what an earlier process with the same prompts and options left.

        Args:
          path: where the answers are to lie.
          fingerprint: of prompts and options.

        Raises:
          ValueError: if there are answers already, or those of other prompts or options.
        """
        self._path, self._unfinished = pathlib.Path(path), pathlib.Path(path + UNFINISHED)
        self.done: dict[int, Mapping[str, Any]] = {}
        if self._unfinished.exists():
            self._take_up(fingerprint)
        elif self._path.exists():
            raise ValueError(f"{path} is there already; remove it, or name another file")
        if not self.done:
            durable.make_folder(self._path.parent)
            durable.write(self._unfinished, json.dumps({"fingerprint": fingerprint}) + "\n")
        self.num_found = len(self.done)

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Keeps a batch, by the numbers of its lines; when this returns, no kill loses it."""
        lines = [_as_line({"line": number, "answer": answer}) for number, answer in answers.items()]
        with durable.naming(self._unfinished), self._unfinished.open("ab") as file:
            file.write(b"".join(lines))
        durable.sync(self._unfinished)
        self.done |= answers

    def finish(self, numbers: Sequence[int]) -> None:
        """Writes the answers to all lines into their place, in the order of the numbers."""
        durable.write(self._path, b"".join(_as_line(self.done[number]) for number in numbers))
        self._unfinished.unlink()

    def _take_up(self, fingerprint: str) -> None:
        raw = self._unfinished.read_bytes()
        # A kill may have cut the last line, whose batch is then made anew.
        whole = raw[: raw.rfind(b"\n") + 1]
        first, *rest = whole.splitlines() or [b"{}"]
        if not rest:  # nothing that could be of another command
            return
        if parse_object(first, f"{self._unfinished}:1").get("fingerprint") != fingerprint:
            raise ValueError(
                f"{self._unfinished} has answers to other prompts, or by other weights or options; give the "
                "command that began it, name another file, or remove it"
            )
        os.truncate(self._unfinished, len(whole))
        for number, line in enumerate(rest, 2):
            record = parse_object(line, f"{self._unfinished}:{number}")
            if record.keys() != {"line", "answer"}:
                raise ValueError(
                    f"{self._unfinished}:{number} is no answer; remove the file, and all begin anew"
                )
            self.done[record["line"]] = record["answer"]


def _as_line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"
