"""Copies of one attempt of a run: writes this process's, and sends and receives those of neighbors."""

import concurrent.futures
import dataclasses
import pathlib
import secrets
import shutil
from typing import Any

import numpy as np

from zaya_jax.checkpoint import folder_bytes
from zaya_jax.checkpoint.peers.copies import (
    MAX_HEADER_BYTES,
    CopyHeader,
    CopyKey,
    hash_of_parts,
    receive_copy,
    remove_copies,
    write_copy,
)
from zaya_jax.checkpoint.peers.sources import neighbors
from zaya_jax.errors import UserError
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.transfer import Chunks, Transfers
from zaya_jax.platform.background import in_background
from zaya_jax.text_tables import format_bytes

COPIES_PER_STATE = 4
"""Own and received copies of two steps: the next one is only written when the previous one is complete."""


class CopyWriter:
    """Writes and exchanges copies. All processes create one for each attempt, and call its methods alike.

    Args:
      folder: folder of the run's copies on this node.
      num_bytes: bytes of this process's part of the state.
      facts: see `CopyHeader`.
      corpora: see `CopyHeader`.
      restored: step and attempt of the copies that this attempt was restored from; None without.

    Attributes:
      folder: folder of the run's copies on this node.
      neighbor: process that keeps this process's copies; None if there is only one node.

    Raises:
      UserError: if the folder has too little space.
    """

    def __init__(
        self,
        folder: pathlib.Path,
        *,
        num_bytes: int,
        facts: dict[str, str],
        corpora: list[str],
        restored: tuple[int, str] | None,
    ):
        self.folder, self._facts, self._corpora = folder, facts, corpora
        self._attempt = hosts.broadcast_from_first("attempt of copies", secrets.token_hex(8))
        # The copies that were restored stay until those of another step are complete.
        self._complete = restored
        self._step = 0
        self._writing: concurrent.futures.Future[None] | None = None
        # One after the other: several processes of a node remove files of one folder.
        hosts.run_on_all("old peer copies", self._remove_unusable)
        hosts.run_on_all("room for peer copies", lambda: self._check_room(num_bytes))
        self.neighbor = neighbors(hosts.host_names())[hosts.process()]
        self._transfers = Transfers(max_bytes=num_bytes + MAX_HEADER_BYTES, put=self._receive)

    def poll(self) -> tuple[bool, str | None]:
        """Returns whether all processes have ended their previous copies, and a message about a problem.

        Once all have succeeded, the step of these copies is the one that stays until the next is complete.
        """
        is_busy = self._writing is not None and not self._writing.done()
        failure = None if is_busy else self._failure()
        # A step is complete only if all processes say so, and all of them must know which one it is before
        # any removes an older one.
        states = hosts.gather("peer copies", [is_busy, failure])
        if busy := [hosts.describe(n) for n, (is_busy, _) in enumerate(states) if is_busy]:
            return False, f"the state is not copied: {', '.join(busy)} still copies that of step {self._step}"
        failures = [f"{hosts.describe(n)}: {text}" for n, (_, text) in enumerate(states) if text]
        if failures:
            return True, f"the peer copies of step {self._step} are incomplete: {'; '.join(failures)}"
        if self._writing is not None:
            self._complete = self._step, self._attempt
        return True, None

    def write(self, step: int, parts: list[np.ndarray]) -> None:
        """Writes and sends a copy in the background.

        Args:
          step: step of the state.
          parts: this process's part of the state, arrays of bytes.
        """
        self._step, complete = step, self._complete
        self._writing = in_background(lambda: self._write(step, complete, parts), "peer copy")

    def close(self) -> None:
        """Waits until all processes have ended their copies."""
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
        hosts.meet("end of peer copies")
        self._transfers.__exit__()

    def _failure(self) -> str | None:
        """Returns why the previous copy has failed; bugs are raised."""
        error = None if self._writing is None else self._writing.exception()
        if error is None or isinstance(error, OSError | UserError):
            return None if error is None else hosts.error_message(error)
        raise error

    def _remove_unusable(self) -> None:
        kept = [self._attempt, *([] if self._complete is None else ["{}-{}".format(*self._complete)])]
        remove_copies(self.folder, keep=lambda name: any(f"-{each}." in name for each in kept))

    def _check_room(self, num_bytes: int) -> None:
        names = hosts.host_names()
        processes = names.count(names[hosts.process()])
        of_process = COPIES_PER_STATE if len(set(names)) > 1 else COPIES_PER_STATE // 2
        needed = of_process * processes * num_bytes
        free = shutil.disk_usage(self.folder).free + folder_bytes(self.folder)
        if free < needed:
            raise UserError(
                f"peer copies need {format_bytes(needed)} in {self.folder.parent}, which has "
                f"{format_bytes(free)} free; enlarge it (a container's /dev/shm has 64 MiB by default), or "
                "remove train.peer_copies_every"
            )

    def _write(self, step: int, complete: tuple[int, str] | None, parts: list[np.ndarray]) -> None:
        header = CopyHeader(
            step=step,
            attempt=self._attempt,
            owner=hosts.process(),
            content_bytes=sum(part.nbytes for part in parts),
            xxh3_128=hash_of_parts(parts),
            facts=self._facts,
            corpora=self._corpora,
        )
        # Before and not after: there is no room for three steps.
        self._make_room(header.owner, complete)
        path = write_copy(self.folder, header, parts)
        # The file is in memory too.
        parts.clear()
        if self.neighbor is not None:
            about = {"key": dataclasses.astuple(header.key), "complete": complete}
            self._transfers.send(self.neighbor, about, path)

    def _receive(self, about: dict[str, Any], chunks: Chunks) -> None:
        # The sender names the complete step: this process may not have polled yet.
        key = CopyKey(*about["key"])
        self._make_room(key.owner, about["complete"])
        receive_copy(self.folder, key, chunks)

    def _make_room(self, owner: int, complete: tuple[int, str] | None) -> None:
        """Removes the copies of a process, except those of the newest complete step."""
        kept = None if complete is None else CopyKey(*complete, owner).file
        remove_copies(self.folder, keep=lambda name: name == kept, owner=owner)
