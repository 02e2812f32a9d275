"""One process at a time writes to a run folder: processes that start at once, die, and lose their lock."""

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

import zaya_jax
from zaya_jax.checkpoint import lock, run_lock
from zaya_jax.run_folder.names import LOCK_FILE

SCRIPT = pathlib.Path(__file__).with_name("lock_holders.py")
PACKAGE = pathlib.Path(zaya_jax.__file__).parent


class Holder:
    """A process of `lock_holders.py`, which ends after a minute."""

    def __init__(self, action: str, folder: pathlib.Path):
        command = [sys.executable, str(SCRIPT), str(PACKAGE), action, str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid

    def says(self) -> str:
        return self._process.stdout.readline().removesuffix("\n")

    def ask(self, line: str) -> str:
        print(line, file=self._process.stdin, flush=True)
        return self.says()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)

    def leave(self) -> None:
        self._process.communicate(timeout=10)


@contextlib.contextmanager
def holding(folder: pathlib.Path, action: str = "hold") -> Iterator[Holder]:
    holder = Holder(action, folder)
    try:
        assert holder.says() == "held"
        yield holder
    finally:
        holder.kill()
        holder.leave()


def printed_by(action: str, folder: pathlib.Path):
    command = [sys.executable, str(SCRIPT), str(PACKAGE), action, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    return json.loads(done.stdout)


def names(folder: pathlib.Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_lock(folder: pathlib.Path, **fields) -> pathlib.Path:
    """Writes the lock of a process that has ended, by default on another host."""
    folder.mkdir(exist_ok=True)
    values = {"host": "node7", "pid": 12, "since": "2026-11-22 10:00:00+00:00", "kernel": "another"}
    (folder / LOCK_FILE).write_text(json.dumps(values | fields))
    return folder / LOCK_FILE


def test_a_second_writer_is_refused_with_the_name_of_the_first(tmp_path):
    run = tmp_path / "run"
    with holding(run) as holder:
        before = (run / LOCK_FILE).read_bytes()
        with pytest.raises(ValueError, match="another process writes to") as error, run_lock(run):
            pass
        who = rf"process {holder.pid} on {re.escape(socket.gethostname())}, since 20\d\d-\d\d-\d\d \d\d:"
        assert re.search(rf"writes to {run}: {who}[\d:]+\+00:00; wait until", str(error.value))
        assert (run / LOCK_FILE).read_bytes() == before
        assert holder.ask("check") == "done"
        holder.leave()
        with run_lock(run):
            assert names(run) == [LOCK_FILE]
    assert not run.exists()


def test_one_process_acquires_it_once(tmp_path):
    """Two runs of one notebook are two writers."""
    with run_lock(tmp_path):
        with pytest.raises(ValueError, match=f"process {os.getpid()} on"), run_lock(tmp_path):
            pass
        assert names(tmp_path) == [LOCK_FILE]
    assert names(tmp_path) == []


def test_a_killed_writer_holds_no_lock(tmp_path, caplog):
    with holding(tmp_path) as holder:
        holder.kill()
        assert names(tmp_path) == [LOCK_FILE]
        with run_lock(tmp_path):
            assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()
    assert not caplog.text  # no process waited for a heartbeat


def test_of_two_that_start_at_once_one_wins(tmp_path):
    assert printed_by("start_at_once", tmp_path / "runs") == [1] * 20


def test_holders_never_overlap(tmp_path):
    """Also while folders are removed and created again with the same name."""
    assert printed_by("come_and_go", tmp_path / "run") == [[50, 0]] * 3
    assert names(tmp_path) in ([], ["run"])


def test_a_folder_is_emptied_under_its_lock(tmp_path):
    run, kept = tmp_path / "run", tmp_path / "kept"
    for folder in (run / "checkpoints/4", kept):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (run / "link").symlink_to(kept)
    (tmp_path / "to_run").symlink_to(run)
    with holding(tmp_path / "to_run") as holder:
        assert holder.ask("empty") == "done"
        assert names(run) == [LOCK_FILE]
        assert names(tmp_path) == ["kept", "run", "to_run"]
        assert names(kept) == ["file"]
        with pytest.raises(ValueError, match=f"process {holder.pid} "), run_lock(run):
            pass
        assert holder.ask("check") == "done"
        holder.leave()
        assert names(run) == []


def test_empty_folders_are_removed_after_use(tmp_path):
    with contextlib.suppress(ZeroDivisionError), run_lock(tmp_path / "a/b/run"):
        raise ZeroDivisionError
    assert names(tmp_path) == []
    with run_lock(tmp_path / "a/b/run"):
        (tmp_path / "a/file").touch()
    assert names(tmp_path / "a") == ["file"]


@pytest.fixture
def hurry(monkeypatch):
    monkeypatch.setattr(lock, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(lock, "RETRY_SECONDS", 0.2)


def test_a_silent_writer_on_another_host_is_replaced_with_a_warning(tmp_path, hurry, caplog):
    write_lock(tmp_path)
    with run_lock(tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK_FILE).read_text()
    who = "process 12 on node7, since 2026-11-22 10:00:00+00:00"
    waiting, takeover = [record.getMessage() for record in caplog.records]
    assert waiting == f"{tmp_path} has the lock of {who}; waiting 1 s for a heartbeat"
    assert takeover == f"{tmp_path}: {who} has no heartbeat; this process takes over its lock"


def test_a_live_writer_on_another_host_is_respected(tmp_path, hurry, caplog):
    """The file system does not show its lock here."""
    with holding(tmp_path, "as_on_a_host_of_its_own") as holder:
        with pytest.raises(ValueError, match=f"process {holder.pid} "), run_lock(tmp_path):
            pass
        assert holder.ask("check") == "done"
        holder.kill()
        with run_lock(tmp_path):
            pass
    assert "has no heartbeat" in caplog.text


def test_a_file_system_without_locks_uses_heartbeats(tmp_path, hurry, monkeypatch, caplog):
    """Sharing a kernel proves nothing there."""

    def fail(*_):
        raise OSError(38, "Function not implemented")

    with holding(tmp_path, "with_a_quick_heart") as holder:
        monkeypatch.setattr(lock.fcntl, "flock", fail)
        with pytest.raises(ValueError, match=f"process {holder.pid} "), run_lock(tmp_path):
            pass
        holder.kill()
        with run_lock(tmp_path):
            pass
    assert "has no heartbeat" in caplog.text


@pytest.mark.parametrize("taken_over", [False, True])
def test_a_writer_is_notified_that_its_lock_is_gone(tmp_path, taken_over):
    with holding(tmp_path, "with_a_quick_heart") as holder:
        assert holder.ask("check") == "done"
        (tmp_path / LOCK_FILE).unlink()
        with run_lock(tmp_path) if taken_over else contextlib.nullcontext():
            message, deadline = "done", time.monotonic() + 30
            while message == "done" and time.monotonic() < deadline:
                time.sleep(0.01)
                message = holder.ask("check")
            assert message.startswith(f"{tmp_path}/lock was removed or taken over by another process")
            holder.leave()
            assert names(tmp_path) == [LOCK_FILE] * taken_over


def make_folder(path: pathlib.Path) -> None:
    path.mkdir()
    (path / "file").touch()


HOSTILE = {
    "a folder": make_folder,
    "a pipe": os.mkfifo,
    "a link to a file": lambda path: path.symlink_to(path.parent.with_name("outside")),
    "a link to nothing": lambda path: path.symlink_to(path.parent.with_name("nothing")),
    "a link to itself": lambda path: path.symlink_to(path),
    "another's file": lambda path: path.write_text("yarn lockfile v1\n"),
    "no text": lambda path: path.write_bytes(b"\xff\x00" * 10),
    "a large file": lambda path: path.write_bytes(b" " * 10**6),
    "nested brackets": lambda path: path.write_text("[" * 4000),
    "other fields": lambda path: path.write_text('{"host": "a", "pid": 1}'),
    "a host that moves the cursor": lambda path: write_lock(path.parent, host="\x1b[2J"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_foreign_files_are_left_alone(tmp_path, kind, hurry):
    outside, run = tmp_path / "outside", tmp_path / "run"
    outside.write_text("theirs")
    run.mkdir()
    HOSTILE[kind](run / LOCK_FILE)
    before = (run / LOCK_FILE).lstat()
    with (
        pytest.raises(ValueError, match=f"^{run}/lock is not a lock file that a run wrote") as error,
        run_lock(run),
    ):
        pass
    assert str(error.value).isprintable()
    after = (run / LOCK_FILE).lstat()
    assert os.path.samestat(after, before)
    assert after.st_mtime_ns == before.st_mtime_ns
    assert outside.read_text() == "theirs"
    assert names(tmp_path) == ["outside", "run"]


def test_a_lock_that_changed_owner_meanwhile_is_not_removed(tmp_path, hurry, monkeypatch):
    """Between reading the dead process's lock and removing it, another process has acquired it."""

    def read(path, file):
        found = look(path, file)
        if found.pid == 12:
            path.unlink()
            write_lock(tmp_path, pid=99)
        else:
            pids.append(found.pid)
            path.unlink()
        return found

    look, pids = lock.read_writer, []
    write_lock(tmp_path, kernel=lock.this_kernel())
    monkeypatch.setattr(lock, "read_writer", read)
    with run_lock(tmp_path):
        assert pids == [99]


def test_an_empty_lock_is_from_a_process_killed_while_creating_it(tmp_path, hurry):
    (tmp_path / LOCK_FILE).touch()
    with run_lock(tmp_path):
        assert (tmp_path / LOCK_FILE).stat().st_size


def test_a_lock_that_cannot_be_created_is_reported(tmp_path, monkeypatch):
    """A full disk leaves no files."""

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lock.os, "write", fail)
    with pytest.raises(OSError, match="No space left") as error, run_lock(tmp_path / "run"):
        pass
    assert error.value.filename == str(tmp_path / "run/lock")
    assert names(tmp_path) == []
