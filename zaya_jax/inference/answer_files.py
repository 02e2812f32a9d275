"""Answer files: JSON lines, saved as they arrive, and moved to their final place when all are complete."""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import parse_object

UNFINISHED = ".unfinished"
"""Suffix of the file that collects answers, in any order, until all are complete."""


class AnswerFile:
    """The answers to one file of prompts.

    Attributes:
      done: answers by line number of their prompt.
      num_resumed: number of answers that an earlier process left.
    """

    def __init__(self, path: str, fingerprint: str):
        """Opens the file, with the answers of an earlier process that had the same prompts and options.

        Args:
          path: final path of the answers.
          fingerprint: hash of prompts and options.

        Raises:
          UserError: if the file exists already, or has unfinished answers to other prompts or options.
        """
        self._path, self._unfinished = pathlib.Path(path), pathlib.Path(path + UNFINISHED)
        self.done: dict[int, Mapping[str, Any]] = {}
        if self._unfinished.exists():
            self._resume(fingerprint)
        elif self._path.exists():
            raise UserError(f"{path} exists already; remove it, or name another file")
        # Also if the file is there without an answer: a crash may have cut its first line.
        if not self.done:
            durable.make_folder(self._path.parent)
            durable.write(self._unfinished, json.dumps({"fingerprint": fingerprint}) + "\n")
        self.num_resumed = len(self.done)

    def add(self, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Saves answers by line number; once this returns, a crash does not lose them."""
        lines = [_json_line({"line": number, "answer": answer}) for number, answer in answers.items()]
        with durable.path_in_errors(self._unfinished), self._unfinished.open("ab") as file:
            file.write(b"".join(lines))
        # fsync: after a crash of the machine the file must not be shorter than what was reported as done.
        durable.sync(self._unfinished)
        self.done |= answers

    def finish(self, numbers: Sequence[int]) -> None:
        """Writes the answers to their final path, in the order of the line numbers."""
        durable.write(self._path, b"".join(_json_line(self.done[number]) for number in numbers))
        # Last: until the final file is complete, the unfinished one is what a restart resumes from.
        self._unfinished.unlink()

    def _resume(self, fingerprint: str) -> None:
        raw = self._unfinished.read_bytes()
        # A crash may have cut the last line; it is computed again.
        complete = raw[: raw.rfind(b"\n") + 1]
        first, *rest = complete.splitlines() or [b"{}"]
        if not rest:  # no answers that could belong to another command
            return
        if parse_object(first, f"{self._unfinished}:1").get("fingerprint") != fingerprint:
            raise UserError(
                f"{self._unfinished} has answers to other prompts, or by other weights or options (including "
                "the batch size); run the command that started it, name another file, or remove it"
            )
        # The next answer must not be appended to a line that was cut.
        os.truncate(self._unfinished, len(complete))
        for number, line in enumerate(rest, 2):
            record = parse_object(line, f"{self._unfinished}:{number}")
            if record.keys() != {"line", "answer"}:
                raise UserError(
                    f"{self._unfinished}:{number} is not an answer; remove the file to start again"
                )
            self.done[record["line"]] = record["answer"]


def _json_line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False).encode() + b"\n"
