"""One writer a run folder: a file in it that the writer keeps locked, and that says who it is.

`flock` (man 2 flock) ends with the process, however that ends: on one host nothing is left to clean up.
But a file system of many hosts may keep locks to one of them (Lustre's `localflock`, NFS's `local_lock`),
or have none. So a writer also touches its file every few seconds. Who finds that of another host free
watches it for a while, and takes it over aloud when nothing stirs; the hosts' clocks need not agree.

Nothing is ever written into a file that is there: one is made, or the file of the dead is removed.
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

from zaya_jax import durable
from zaya_jax.json_files import parse_object

LOCK_FILE = "lock"
BEAT_SECONDS = 10.0
"""Between two touches of the file."""
SILENT_SECONDS = 60.0
"""After so long without a touch, a writer on another host counts as dead."""
_PATIENCE_SECONDS = 1.0
"""For what passes: a file that is just being made, or just being removed."""
_LOOK_SECONDS = 0.05
_LONGEST_LINE = 4096
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
"""What `flock` says on a file system without locks."""


@contextlib.contextmanager
def run_lock(run_folder: str | pathlib.Path) -> "Iterator[RunLock]":
    """Makes this process the one that writes into a run folder; of several processes of a run, one takes it.

    Makes the folder where there is none, and removes it again if nothing came into it.

    Raises:
      ValueError: if another process writes there, or what has the lock's name is no lock.
    """
    folder = pathlib.Path(run_folder).resolve()  # what a link stands for may change meanwhile
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with RunLock(folder) as lock:
            yield lock
    finally:
        with contextlib.suppress(OSError):  # not empty: it has a run now, or another's lock
            for path in made:
                path.rmdir()


class RunLock:
    """That this process alone writes into a run folder; `run_lock` gives it.

    Attributes:
      folder: of the run, and no link to it.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        self._held = _take(folder)
        self._lost = False
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="run lock", daemon=True)

    def __enter__(self) -> "RunLock":
        self._heart.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._heart.join(BEAT_SECONDS)  # it may hang with the file system
        self._held.release()

    def check(self) -> None:
        """Tells of a lock that is gone, some seconds later; costs nothing.

        Raises:
          ValueError: if somebody removed it, or took it over while this process was stopped.
        """
        if self._lost:
            raise ValueError(
                f"{self.folder / LOCK_FILE} was removed or taken over by another process while this one "
                "wrote; it stops, for two would write over each other"
            )

    def empty_folder(self) -> None:
        """Throws away what the run folder holds, which at no moment is without the lock."""
        aside = durable.name_beside(self.folder)
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
            old.release()  # first: NFS does not remove a folder in which a file is open
        finally:
            shutil.rmtree(aside)

    def _beat(self) -> None:
        while not self._ended.wait(BEAT_SECONDS):
            # What a disk has against it, the run will hear at its next save.
            with contextlib.suppress(OSError):
                held = self._held
                held.touch()
                self._lost = not held.is_in_place() and held is self._held


@dataclasses.dataclass(frozen=True)
class _Held:
    """A lock that was taken: descriptors of its folder, which may get another name, and of its file."""

    folder: int
    file: int

    def touch(self) -> None:
        os.utime(self.file)

    def is_in_place(self) -> bool:
        try:
            found = os.stat(LOCK_FILE, dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(self.file))

    def release(self) -> None:
        # A file that a failing disk keeps is nobody's once it is closed.
        with contextlib.suppress(OSError):
            if self.is_in_place():
                os.unlink(LOCK_FILE, dir_fd=self.folder)
        os.close(self.file)
        os.close(self.folder)


@dataclasses.dataclass(frozen=True)
class _Writer:
    """Who writes into a run folder, as its lock says."""

    host: str
    pid: int
    since: str
    kernel: str
    """Whose locks it sees."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def _this_writer() -> _Writer:
    now = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
    return _Writer(socket.gethostname(), os.getpid(), now, _this_kernel())


def _this_kernel() -> str:
    """This boot of this host; containers on it have names of their own, and share its locks."""
    boot = pathlib.Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _take(folder: pathlib.Path) -> _Held:
    """Takes the lock of a folder, which is made if it is not there.

    Raises:
      ValueError: if another process has it.
    """
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        is_late = time.monotonic() > deadline
        durable.make_folder(folder)
        with contextlib.suppress(FileNotFoundError):  # folder or file went just now: whoever had it left
            held = _make(folder)
            if held is not None:
                return held
            writer = _find_writer(folder / LOCK_FILE, is_late=is_late)
            if writer is not None and is_late:
                raise ValueError(_refusal(folder, writer))
        time.sleep(_LOOK_SECONDS)


def _make(folder: pathlib.Path) -> _Held | None:
    """Makes the lock's file and locks it; None if there is one."""
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        file = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666, dir_fd=place)
    except OSError as error:
        os.close(place)
        if isinstance(error, FileExistsError):
            return None
        error.filename = str(folder / LOCK_FILE)  # the system names it from the folder on
        raise
    held = _Held(place, file)
    try:
        with durable.naming(folder / LOCK_FILE):
            _lock(file, wait=True)  # for those who look at a file that is still empty, and leave it
            os.write(file, json.dumps(dataclasses.asdict(_this_writer())).encode() + b"\n")
        durable.sync(folder / LOCK_FILE)  # other hosts see nothing of it before
        if os.path.samestat(os.stat(folder / LOCK_FILE), os.fstat(file)):
            return held
    except BaseException:
        held.release()
        raise
    held.release()
    return None


def _lock(file: int, *, wait: bool) -> bool | None:
    """Locks a file, and says whether it could; None if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _find_writer(path: pathlib.Path, *, is_late: bool) -> str | None:
    """Says who has a lock; None if nobody can be told yet, or it was removed because its writer is dead."""
    if not stat.S_ISREG(path.lstat().st_mode):
        raise ValueError(_no_lock(path))
    # Neither a link nor a pipe that took its place just now is followed or waited for.
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        is_free, writer = _lock(file, wait=False), _read(path, file)
        if writer is None:
            if is_free is False or not is_late:
                return "it does not say which one it is"
        elif writer.kernel != _this_kernel() or is_free is None:
            _outlive(path, writer)
        elif not is_free:
            return str(writer)
        if os.path.samestat(path.lstat(), os.fstat(file)):
            path.unlink()
    finally:
        os.close(file)
    return None


def _read(path: pathlib.Path, file: int) -> _Writer | None:
    """Who wrote a lock; None as long as it is empty.

    Raises:
      ValueError: if it holds something else.
    """
    line = os.pread(file, _LONGEST_LINE, 0)
    if not line:
        return None
    try:
        writer = _Writer(**parse_object(line, str(path)))
    except (ValueError, TypeError) as error:
        raise ValueError(_no_lock(path)) from error
    # Shown to people as it is.
    if not all(str(value).isprintable() for value in dataclasses.astuple(writer)):
        raise ValueError(_no_lock(path))
    return writer


def _no_lock(path: pathlib.Path) -> str:
    return f"{path} is no lock that a run made; move it away, for a run has its lock there"


def _refusal(folder: pathlib.Path, writer: str) -> str:
    return f"another process writes into {folder}: {writer}; only one may, so let it end, or end it"


def _outlive(path: pathlib.Path, writer: _Writer) -> None:
    """Watches the lock of a writer that no lock here tells of, until it counts as dead.

    Raises:
      ValueError: if it lives.
    """
    log, folder = logging.getLogger(__name__), path.parent
    log.warning("%s has the lock of %s; waiting %g s for a sign of life", folder, writer, SILENT_SECONDS)
    before, deadline = _sign_of_life(path), time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        time.sleep(min(1.0, BEAT_SECONDS))
        if _sign_of_life(path) != before:
            raise ValueError(_refusal(folder, str(writer)))
    log.warning("%s: %s gives no sign of life; this process writes in its place", folder, writer)


def _sign_of_life(path: pathlib.Path) -> tuple[int, int]:
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)  # opening asks the server anew
    try:
        found = os.fstat(file)
    finally:
        os.close(file)
    return found.st_ino, found.st_mtime_ns
