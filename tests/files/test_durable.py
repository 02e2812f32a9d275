"""Durable writes: processes killed at every line, and what is flushed to disk before a rename."""

import ast
import contextlib
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

import zaya_jax
from zaya_jax.files import durable

SCRIPT = pathlib.Path(__file__).with_name("killed_writes.py")
PACKAGE = pathlib.Path(zaya_jax.__file__).parent


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """Kills a process at each line of each action. Returns what was then at the path and next to it."""
    folder = tmp_path_factory.mktemp("killed") / "work"
    command = [sys.executable, str(SCRIPT), durable.__file__, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("action", "before", "after"),
    [
        ("a new file", "nothing", "new"),
        ("a file in another's place", "old", "new"),
        ("a new folder", "nothing", "new"),
        ("a folder in another's place", "old", "new"),
        ("a folder removed", "old", "nothing"),
    ],
)
def test_a_kill_leaves_the_old_or_the_new(killed, action, before, after):
    states = [place for place, _ in killed[action]]
    assert len(states) > 5
    turn = states.index(after)
    assert states == [before] * turn + [after] * (len(states) - turn)
    assert turn > 0
    assert killed[action][-1] == [after, []], "an unkilled one leaves no other file"


def test_a_file_system_that_cannot_exchange_loses_nothing(killed):
    """Between the renames, no folder has the final name, but both are complete under other names."""
    outcomes = killed["the same on NFS"]
    places = [place for place, _ in outcomes]
    assert set(places) == {"old", "new", "nothing"}
    assert places == sorted(places, key=["old", "nothing", "new"].index)
    assert all(beside == ["new", "old"] for place, beside in outcomes if place == "nothing")
    assert outcomes[-1] == ["new", []]


@pytest.fixture
def synced(monkeypatch):
    """Records each path that is flushed to disk, with an observation made at that time."""

    def watch(note):
        log, fsync = [], os.fsync

        def record(descriptor):
            log.append((os.readlink(f"/proc/self/fd/{descriptor}"), note()))
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", record)
        return log

    return watch


def test_a_file_is_on_the_disk_before_its_name(tmp_path, synced):
    file = tmp_path / "config.json"
    file.write_text("old")
    aside = file.with_name("config.json.partial")
    log = synced(lambda: (file.read_text(), aside.exists() and aside.read_text()))
    durable.write(file, "é")
    assert log == [(str(aside), ("old", "é")), (str(tmp_path), ("é", False))]


@pytest.mark.parametrize("replace", [False, True])
def test_all_of_a_folder_is_on_the_disk_before_its_name(tmp_path, synced, replace):
    place = tmp_path / "place"
    if replace:
        place.mkdir()
        (place / "old").touch()
    log = synced(lambda: (place / "inner/file").exists())
    with durable.temporary_folder(place, replace=replace) as aside:
        (aside / "inner").mkdir()
        (aside / "inner/file").write_text("new")
    before = {path for path, there in log if not there}
    assert before >= {str(aside), str(aside / "inner"), str(aside / "inner/file")}
    assert (str(tmp_path), True) in log
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == [
        "place", "place/inner", "place/inner/file"
    ]  # fmt: skip


def test_names_in_a_folder_are_on_the_disk_before_its_own(tmp_path, synced):
    """The files are not flushed again: a conversion has thousands, which are already on disk."""
    aside, place = tmp_path / "aside", tmp_path / "place"
    (aside / "inner").mkdir(parents=True)
    (aside / "inner/file").touch()
    log = synced(place.exists)
    durable.publish(aside, place)
    assert log == [(str(aside), False), (str(aside / "inner"), False), (str(tmp_path), True)]


def test_a_folder_that_another_process_created_first(tmp_path):
    place = tmp_path / "place"
    aside = tmp_path / "aside"
    for folder, name in ((aside, "mine"), (place, "theirs")):
        folder.mkdir()
        (folder / name).touch()
    with pytest.raises(FileExistsError, match="another process") as error:
        durable.publish(aside, place)
    assert error.value.filename == str(place)
    assert [path.name for path in place.iterdir()] == ["theirs"]


def test_a_failed_exchange_keeps_the_old_folder(tmp_path, monkeypatch):
    """The second of the renames that replace an exchange fails."""
    place, aside = tmp_path / "place", tmp_path / "aside"
    place.mkdir()
    monkeypatch.setattr(durable.ctypes, "CDLL", lambda _: None)
    with pytest.raises(FileNotFoundError):
        durable._exchange(aside, place)
    assert list(tmp_path.iterdir()) == [place]


def test_names_of_created_parents_are_on_the_disk(tmp_path, synced):
    log = synced(lambda: None)
    durable.make_folder(tmp_path / "a/b/c")
    assert {path for path, _ in log} == {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a/b")}
    log.clear()
    durable.make_folder(tmp_path / "a/b/c")
    assert log == []


def test_a_file_in_parts_is_hashed_and_on_the_disk(tmp_path, synced):
    file = durable.HashedFile(tmp_path / "file")
    whole = file._stream

    class ThreeBytesAtOnce:
        """A stream that writes three bytes per call, as the system writes at most 2 GiB."""

        def write(self, part):
            return whole.write(part[:3])

    log = synced(lambda: whole.closed)
    file._stream = ThreeBytesAtOnce()
    file.write(memoryview(b"0123456"))
    file._stream = whole
    file.write(memoryview(b"789"))
    assert file.commit() == hashlib.sha256(b"0123456789").hexdigest()
    assert (tmp_path / "file").read_bytes() == b"0123456789"
    assert log == [(str(tmp_path / "file"), False)]
    assert whole.closed


@pytest.mark.timeout(20)
@pytest.mark.parametrize("what", ["pipe", "link"])
def test_a_pipe_or_link_at_the_temporary_path_is_replaced(tmp_path, what):
    """Opening a pipe would block, and a link leads to another file."""
    (tmp_path / "theirs").write_text("precious")
    aside = tmp_path / "file.partial"
    os.mkfifo(aside) if what == "pipe" else aside.symlink_to(tmp_path / "theirs")
    durable.write(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "theirs").read_text() == "precious"
    assert not aside.exists()


def test_a_list_of_checksums_that_is_too_long_is_not_read(tmp_path):
    (tmp_path / durable.CHECKSUMS).touch()
    os.truncate(tmp_path / durable.CHECKSUMS, 2**40)
    with pytest.raises(ValueError, match=r"has 1,099,511,627,776 bytes; the maximum is 100,000,000"):
        durable.read_checksums(tmp_path)


def test_bytes_are_written_as_they_are(tmp_path):
    durable.write(tmp_path / "file", b"\x00\xff\r\n")
    assert (tmp_path / "file").read_bytes() == b"\x00\xff\r\n"


def test_checksums_are_those_of_coreutils(tmp_path):
    (tmp_path / "inner").mkdir()
    content = {"b": b"", "inner/a c": b"\x00\n"}
    for name, raw in content.items():
        (tmp_path / name).write_bytes(raw)
    sums = {name: durable.sha256_of_file(tmp_path / name) for name in content}
    assert sums == {name: durable.sha256(raw) for name, raw in content.items()}
    durable.write_checksums(tmp_path, sums)
    check = ["sha256sum", "--check", "--strict", durable.CHECKSUMS]
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 0
    assert durable.read_checksums(tmp_path) == sums
    assert durable.find_damage(tmp_path, sums) is None
    (tmp_path / "b").write_bytes(b"\x00")
    assert (
        durable.find_damage(tmp_path, sums) == f"{tmp_path}/b is not as it was written: its checksum differs"
    )
    (tmp_path / "b").unlink()
    assert durable.find_damage(tmp_path, sums) == f"{tmp_path}/b is missing; SHA256SUMS lists it"


OWN = {
    ("os", "fsync"),
    ("os", "replace"),
    ("os", "rename"),
    ("hashlib", "sha256"),
    ("hashlib", "file_digest"),
}


def durable_calls(file: pathlib.Path) -> set[tuple[str, str]]:
    """Returns the functions of `OWN` that a file calls, and its renames."""
    calls = [node.func for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call)]
    outcomes = {(ast.unparse(call.value), call.attr) for call in calls if isinstance(call, ast.Attribute)}
    return {call for call in outcomes if call in OWN or call[1] == "rename"}


def test_only_one_module_flushes_and_renames():
    """Any other implementation would sooner or later forget to flush."""
    others = [file for file in PACKAGE.rglob("*.py") if file.name != "durable.py"]
    assert len(others) > 100
    assert {str(file): calls for file in others if (calls := durable_calls(file))} == {}
    assert len(durable_calls(PACKAGE / "files" / "durable.py")) > 4


@pytest.mark.parametrize("what", ["a file", "a folder's names", "a file in parts"])
def test_errors_of_a_failing_disk_name_the_path(tmp_path, monkeypatch, what):
    """Errors of the system name a path when opening a file, but not when flushing it."""

    def fail(_):
        raise OSError(5, "Input/output error")

    hashed = durable.HashedFile(tmp_path / "file")
    actions = {
        "a file": (lambda: durable.write(tmp_path / "file", "new"), "file.partial"),
        "a folder's names": (lambda: durable.sync(tmp_path), ""),
        "a file in parts": (hashed.commit, "file"),
    }
    action, name = actions[what]
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="Input/output") as error:
        action()
    hashed.close()
    assert error.value.filename == str(tmp_path / name)


def test_an_error_leaves_no_temporary_folder(tmp_path):
    with contextlib.suppress(ZeroDivisionError), durable.temporary_folder(tmp_path / "place") as aside:
        (aside / "file").touch()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
