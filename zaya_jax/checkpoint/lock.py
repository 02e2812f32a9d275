"""Lock of a run folder: a file that names the writing process and is locked while that process lives.

`flock` (man 2 flock) is released when the process ends for any reason, so on one host nothing is left to
clean up. A file system that is shared by hosts may however apply locks per host (Lustre's `localflock`, NFS's
`local_lock`), or not support them. The writer therefore also touches the file every few seconds (heartbeat).
A process that finds the lock of another host free watches it for a while, and takes it over with a warning if
there is no heartbeat; clocks of the hosts need not agree.

An existing lock file is never written to: a lock is created, or the file of a dead process is removed.
"""

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import logging
import os
import pathlib
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator

from zaya_jax.errors import UserError
from zaya_jax.files import durable
from zaya_jax.files.json_files import parse_object
from zaya_jax.run_folder.names import LOCK_FILE

BEAT_SECONDS = 10.0
"""Interval of the heartbeat."""
SILENT_SECONDS = 60.0
"""Time without a heartbeat after which a writer on another host is considered dead."""
RETRY_SECONDS = 1.0
"""Time to retry while another process is creating or removing the file."""
_POLL_SECONDS = 0.05
_MAX_BYTES = 4096
"""Maximum size of a lock file."""
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""Errors of `flock` on a file system that does not support locks."""


@contextlib.contextmanager
def run_lock(run_folder: str | pathlib.Path) -> "Iterator[RunLock]":
    """Locks a run folder for writing. If a run has several processes, only one of them holds the lock.

    Creates the folder if it does not exist, and removes it afterwards if it is still empty.

    Raises:
      UserError: if another process holds the lock, or the file is not a lock.
    """
    folder = pathlib.Path(run_folder).resolve()  # a link could be changed while the lock is held
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with RunLock(folder) as lock:
            yield lock
    finally:
        with contextlib.suppress(OSError):  # not empty: it contains a run, or the lock of another process
            # Innermost folder first.
            for path in created:
                path.rmdir()


class RunLock:
    """A held lock of a run folder; use `run_lock` to acquire one.

    Attributes:
      folder: path of the run folder without links.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._held = _take(folder)
        # Written by the heartbeat thread and read by `check`; an assignment is atomic in Python.
        self._lost = False
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def __enter__(self) -> "RunLock":
        self._heart.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._heart.join(BEAT_SECONDS)  # a timeout, because the thread may hang with the file system
        self._held.release()

    def check(self) -> None:
        """Raises an error if the lock was lost, within seconds of the loss; reads only a flag.

        Raises:
          UserError: if another process removed the lock, or took it over while this process was suspended.
        """
        if self._lost:
            raise UserError(
                f"{self.folder / LOCK_FILE} was removed or taken over by another process; this process "
                "stops, because two writers would overwrite each other's files"
            )

    def empty_folder(self) -> None:
        """Replaces the run folder by an empty one. The folder has a lock at every moment."""
        aside = durable.temporary_path(self.folder)
        durable.make_folder(aside)
        old = self._held
        try:
            new = _take(aside)
            try:
                durable.publish(aside, self.folder, replace=True)
            except BaseException:
                new.release()
                raise
            self._held = new
            old.release()  # before rmtree: NFS cannot remove a folder that contains an open file
        finally:
            shutil.rmtree(aside)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # An error of the disk will be raised by the next save.
            with contextlib.suppress(OSError):
                held = self._held
                held.touch()
                self._lost = not held.is_in_place() and held is self._held


@dataclasses.dataclass(frozen=True)
class _Held:
    """File descriptors of a lock's folder, which may be renamed while the lock is held, and of its file."""

    folder: int
    file: int

    def touch(self) -> None:
        # Updates the modification time, which other hosts can see on a shared file system.
        os.utime(self.file)

    def is_in_place(self) -> bool:
        try:
            status = os.stat(LOCK_FILE, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(status, os.fstat(self.file))

    def release(self) -> None:
        # If a failing disk keeps the file, closing it releases the lock anyway.
        with contextlib.suppress(OSError):
            if self.is_in_place():
                os.unlink(LOCK_FILE, dir_fd=self.folder)
        os.close(self.file)
        os.close(self.folder)


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Content of a lock file: the process that writes to the run folder.

    Attributes:
      host: host name of the process.
      pid: process id.
      since: time at which the lock was acquired, in UTC.
      kernel: boot id of the host; processes of the same kernel see each other's locks.
    """

    host: str
    pid: int
    since: str
    kernel: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def this_kernel() -> str:
    """Boot id of this host. Containers have their own host names, but share the kernel and its locks."""
    # Locks of `flock` are visible to all processes of one kernel, whatever their host names are.
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _take(folder: pathlib.Path) -> _Held:
    """Acquires the lock of a folder, and creates the folder if necessary.

    Raises:
      UserError: if another process holds it.
    """
    # An empty file may be in the middle of being created by another process, so retry for a while.
    deadline = time.monotonic() + RETRY_SECONDS
    while True:
        is_late = time.monotonic() > deadline
        durable.make_folder(folder)
        with contextlib.suppress(FileNotFoundError):  # folder or file was removed just now: retry
            held = _create(folder)
            if held is not None:
                return held
            writer = _find_writer(folder / LOCK_FILE, is_late=is_late)
            if writer is not None and is_late:
                raise UserError(_busy_message(folder, writer))
        time.sleep(_POLL_SECONDS)


def _create(folder: pathlib.Path) -> _Held | None:
    """Creates the lock file and locks it; None if it already exists."""
    folder_descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=folder_descriptor)
    except OSError as error:
        os.close(folder_descriptor)
        if isinstance(error, FileExistsError):
            return None
        error.filename = str(folder / LOCK_FILE)  # with dir_fd the error only has the name inside the folder
        raise
    held = _Held(folder_descriptor, file)
    try:
        with durable.path_in_errors(folder / LOCK_FILE):
            _lock(file, wait=True)  # other processes lock the empty file briefly to inspect it
            since = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
            writer = _Writer(socket.gethostname(), os.getpid(), since, this_kernel())
            os.write(file, json.dumps(dataclasses.asdict(writer)).encode() + b"\n")
        durable.sync(folder / LOCK_FILE)  # only then do other hosts see the content
        # Another process may have removed the file between its creation and the lock.
        if os.path.samestat(os.stat(folder / LOCK_FILE), os.fstat(file)):
            return held
    except BaseException:
        held.release()
        raise
    held.release()
    return None


def _lock(file: int, *, wait: bool) -> bool | None:
    """Whether a file could be locked; None if the file system does not support locks."""
    try:
        # Not `lockf`: its locks are lost when any descriptor of the file is closed.
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _find_writer(path: pathlib.Path, *, is_late: bool) -> str | None:
    """The process that holds a lock; None to retry: it is unknown yet, or a dead lock was removed."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise UserError(_invalid_message(path))
    # The flags guard against a link or a pipe that replaced the file after the check above.
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        is_free, writer = _lock(file, wait=False), read_writer(path, file)
        if writer is None:
            if is_free is False or not is_late:
                return "its lock file is empty"
        elif writer.kernel != this_kernel() or is_free is None:
            _wait_for_heartbeat(path, writer)
        elif not is_free:
            return str(writer)
        # Only the file that was inspected is removed, not one that has replaced it since.
        if os.path.samestat(path.lstat(), os.fstat(file)):
            path.unlink()
    finally:
        os.close(file)
    return None


def read_writer(path: pathlib.Path, file: int) -> _Writer | None:
    """Reads a lock file; None if it is still empty.

    Raises:
      UserError: if the content is not that of a lock.
    """
    line = os.pread(file, _MAX_BYTES, 0)
    if not line:
        return None
    try:
        writer = _Writer(**parse_object(line, str(path)))
    except (ValueError, TypeError) as error:
        raise UserError(_invalid_message(path)) from error
    # The values are printed in messages, so control characters of a forged file must not reach a terminal.
    if not all(str(value).isprintable() for value in dataclasses.astuple(writer)):
        raise UserError(_invalid_message(path))
    return writer


def _invalid_message(path: pathlib.Path) -> str:
    return f"{path} is not a lock file that a run wrote, but a run needs that name; move the file away"


def _busy_message(folder: pathlib.Path, writer: str) -> str:
    return f"another process writes to {folder}: {writer}; wait until it exits, or stop it"


def _wait_for_heartbeat(path: pathlib.Path, writer: _Writer) -> None:
    """Watches the lock of a process on another host until that process is considered dead.

    Raises:
      UserError: if there is a heartbeat.
    """
    log, folder = logging.getLogger(__name__), path.parent
    log.warning("%s has the lock of %s; waiting %g s for a heartbeat", folder, writer, SILENT_SECONDS)
    before, deadline = _heartbeat(path), time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, BEAT_SECONDS))
        if _heartbeat(path) != before:
            raise UserError(_busy_message(folder, str(writer)))
    log.warning("%s: %s has no heartbeat; this process takes over its lock", folder, writer)


def _heartbeat(path: pathlib.Path) -> tuple[int, int]:
    file = os.open(
        path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    )  # opening a file on NFS revalidates its cached attributes
    try:
        status = os.fstat(file)
    finally:
        os.close(file)
    return status.st_ino, status.st_mtime_ns
