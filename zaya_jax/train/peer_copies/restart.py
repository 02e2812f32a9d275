"""The restart of a run from copies of its state in the memory of its nodes."""

import contextlib
import dataclasses
import pathlib
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from zaya_jax.checkpoint import SavedStep
from zaya_jax.checkpoint.peers.copies import (
    MAX_HEADER_BYTES,
    CopyHeader,
    CopyKey,
    map_file,
    read_headers,
    verified,
)
from zaya_jax.checkpoint.peers.sources import CompleteStep, in_order_of_distance, newest_complete
from zaya_jax.config import Config
from zaya_jax.errors import DamagedError, UserError
from zaya_jax.parallel.processes import hosts
from zaya_jax.parallel.processes.transfer import Transfers
from zaya_jax.run_folder.events import write_event
from zaya_jax.run_folder.names import DAMAGED, RESTORED
from zaya_jax.train.hooks.skipped_ranges import shared_skipped_ranges
from zaya_jax.train.peer_copies.host_state import CopyLayout, place_parts
from zaya_jax.train.peer_copies.identity import RunIdentity, copies_folder, facts_of, run_identity
from zaya_jax.train.step.state import TrainState

FETCH_SECONDS = 3600.0
"""How much longer one process may read its part than another."""
Check = Callable[[int | None], SavedStep | None]
"""Checks the run folder in all processes, and returns the checkpoint to start from; with the step of a
complete set of copies, that step, unless a newer checkpoint is intact."""


@dataclasses.dataclass
class RestoredCopy:
    """This process's part of the state that a run restarts from.

    Attributes:
      header: header of the copy.
      layout: layout of the run's copies.
      content: verified bytes; None once they are on the devices.
      received: number of bytes that came from another process.
      seconds: time until all processes had their parts.
    """

    header: CopyHeader
    layout: CopyLayout
    content: memoryview | None
    received: int
    seconds: float

    def place(self, run_folder: str) -> TrainState:
        """Places the state on the devices, and records the restart; it can be called once."""
        assert self.content is not None, "a copy is restored once"
        start = time.monotonic()
        state = place_parts(self.layout, self.content)
        # Not kept: a mapped file takes memory even after its removal.
        size, self.content = len(self.content), None
        seconds = self.seconds + time.monotonic() - start
        sizes = [size - self.received, self.received]
        own, received = hosts.reduce(
            "bytes restored", sizes, lambda each: [*map(sum, zip(*each, strict=True))]
        )
        step = self.header.step
        if hosts.is_first():
            # None of the arrays came from the storage.
            values = {"bytes_from_own_node": own, "bytes_from_peers": received, "bytes_from_storage": 0}
            write_event(run_folder, RESTORED, step=step, seconds=round(seconds, 3), **values)
            print(
                f"restored step {step} from peers in {seconds:.1f} s: {own + received:,} bytes, of which "
                f"{received:,} over the network and none from storage"
            )
        return state


def find_start(
    config: Config, layout: Callable[[], CopyLayout], check: Check, *, overwrite: bool
) -> tuple[SavedStep | None, RestoredCopy | None]:
    """Finds what a run starts from; all processes get the same answer.

    Copies are preferred to a checkpoint of the same step, and a newer checkpoint to copies.

    Args:
      config: config of the run.
      layout: returns the layout of the run's copies; called if the run has made any.
      check: see `Check`.
      overwrite: whether the run starts from scratch.

    Returns:
      Checkpoint or step to start from, None for fresh weights; this process's part of the state, None to read
      the checkpoint.
    """
    start_time = time.monotonic()
    identity = None
    if config.train.peer_copies_every is not None and not overwrite:
        identity = run_identity(config.run_folder, create=False)
    if identity is None:
        return check(None), None
    # A run that has made no copies waits for nothing here.
    search = CopySearch(config, identity, layout())
    with contextlib.ExitStack() as stack:
        while (complete := search.newest()) is not None:
            # Reads only checkpoints of newer steps: usually none, which saves the verification of every byte.
            start = check(complete.step)
            assert start is not None, "there is at least the step of the copies"
            if start.step > complete.step:
                _say(f"checkpoint {start.step} is newer than the peer copies, which are of {complete.step}")
                return start, None
            copy = search.read(complete, stack)
            if copy is not None:
                copy.seconds = time.monotonic() - start_time
                return start, copy
    _say(f"no peer copies are used: {search.obstacle}; resuming from the storage")
    return check(None), None


class CopySearch:
    """Copies of a run that its nodes have at a start. All processes create it, and call its methods.

    Args:
      config: config of the run.
      identity: identity of the run.
      layout: layout of its copies.

    Attributes:
      obstacle: why copies are not used, for a message.
    """

    def __init__(self, config: Config, identity: RunIdentity, layout: CopyLayout):
        self._config, self._layout = config, layout
        self._transfers: Transfers | None = None
        folder = hosts.run_on_all("peer copies folder", lambda: copies_folder(config, identity.place))
        facts = facts_of(config, identity.run, layout.fingerprint, shared_skipped_ranges(config.run_folder))
        # Processes of one node list the same files, so that each of them is a source for all others. Contents
        # are not read yet: only those that are restored are verified, each by one process.
        headers, damaged = read_headers(folder)
        usable = [header for header in headers if header.facts == facts]
        self._paths = {header.key: folder / header.key.file for header in usable}
        keys = [dataclasses.astuple(key) for key in self._paths]
        different = sorted(
            {name for header in headers for name in facts if header.facts.get(name) != facts[name]}
        )
        shared = hosts.gather("peer copies", [keys, different, damaged])
        self._held = [{CopyKey(*key) for key in keys} for keys, _, _ in shared]
        self._report([message for _, _, messages in shared for message in messages])
        self.obstacle = _obstacle(self._held, {name for _, names, _ in shared for name in names})

    def newest(self) -> CompleteStep | None:
        """Returns the newest step that may be restored."""
        return newest_complete(self._held)

    def read(self, complete: CompleteStep, stack: contextlib.ExitStack) -> RestoredCopy | None:
        """Reads and verifies this process's part from its node or from peers.

        Args:
          complete: step to restore.
          stack: its end is the end of transfers, which all processes use in turn.

        Returns:
          The part; None if a process has found no intact copy of its part. Those that were not intact are
          not used again.
        """
        if self._transfers is None:
            # All processes get here alike, because they decide by the same table.
            max_bytes = self._layout.num_bytes + MAX_HEADER_BYTES
            self._transfers = stack.enter_context(Transfers(max_bytes=max_bytes, get=self._path_of))
        copy, failures = self._read_nearest(complete)
        outcomes = hosts.gather("copies read", [copy is not None, failures], limit_seconds=FETCH_SECONDS)
        # In all processes, so that the next decision is the same everywhere. A copy that one source cannot
        # deliver may be intact at another one.
        for owner, (_, failures) in enumerate(outcomes):
            for source, _ in failures:
                self._held[source].discard(complete.key(owner))
        messages = [message for _, failures in outcomes for _, message in failures]
        self._report(messages, step=complete.step)
        if all(succeeded for succeeded, _ in outcomes):
            return copy
        self.obstacle = messages[-1]
        return None

    def _read_nearest(self, complete: CompleteStep) -> tuple[RestoredCopy | None, list[tuple[int, str]]]:
        """Returns this process's part from the nearest intact copy, and a message for each damaged one."""
        process, failures = hosts.process(), []
        key = complete.key(process)
        for source in in_order_of_distance(complete.sources[process], process, hosts.host_names()):
            # The hash is compared where the bytes are used: it covers memory, files and network.
            try:
                return self._read_from(source, key), failures
            except (OSError, UserError) as error:
                reason = hosts.error_message(error)
                what = f"that of process {process} at step {key.step}, kept by {hosts.describe(source)}"
                failures.append((source, f"{what}: {reason}"))
        return None, failures

    def _read_from(self, source: int, key: CopyKey) -> RestoredCopy:
        is_own = source == hosts.process()
        if is_own:
            file = map_file(self._paths[key])
        else:
            assert self._transfers is not None, "it was opened"
            file = memoryview(self._transfers.fetch(source, dataclasses.asdict(key)))
        header, content = verified(file)
        # A file that another program has renamed is intact, and yet the wrong one.
        if header.key != key or len(content) != self._layout.num_bytes:
            raise DamagedError(f"it is a copy of {header.key}, {len(content):,} bytes")
        return RestoredCopy(header, self._layout, content, 0 if is_own else len(content), 0.0)

    def _path_of(self, about: dict[str, Any]) -> pathlib.Path:
        # Only files that were listed: a request does not name paths.
        path = next((p for key, p in self._paths.items() if dataclasses.asdict(key) == about), None)
        if path is None:
            raise FileNotFoundError(f"no copy of {about}")
        return path

    def _report(self, messages: Iterable[str], **values: Any) -> None:
        """Reports damaged copies, in the first process."""
        for message in messages if hosts.is_first() else ():
            print(f"peer copy is not used: {message}", file=sys.stderr)
            write_event(self._config.run_folder, DAMAGED, reason=message, **values)


def _obstacle(held: list[set[CopyKey]], different: set[str]) -> str:
    """Describes why no step may be complete.

    Args:
      held: usable copies by process.
      different: names of facts that differ in other copies.
    """
    if different and not any(held):
        return f"they were made with another value of: {', '.join(sorted(different))}"
    owners = {key.owner for keys in held for key in keys}
    lost = [str(n) for n in range(len(held)) if n not in owners]
    return f"none is left of process {', '.join(lost)}" if lost else "no step is complete"


def _say(message: str) -> None:
    if hosts.is_first():
        print(message)
