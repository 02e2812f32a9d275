"""Files of peer copies: what is written is read, and every damage is detected."""

import dataclasses
import pathlib

import numpy as np
import pytest

from zaya_jax.checkpoint.peers.copies import (
    CopyHeader,
    CopyKey,
    file_system_of,
    hash_of_parts,
    make_private_folder,
    map_file,
    read_headers,
    receive_copy,
    remove_copies,
    verified,
    write_copy,
)
from zaya_jax.errors import DamagedError, UserError

PARTS = [np.arange(200, dtype=np.uint8), np.zeros(0, np.uint8), np.full(1000, 7, np.uint8)]
CONTENT = b"".join(part.tobytes() for part in PARTS)


def header(owner: int = 3, step: int = 12, attempt: str = "ab") -> CopyHeader:
    return CopyHeader(
        owner=owner, step=step, attempt=attempt, content_bytes=len(CONTENT), facts={"code": "1"},
        xxh3_128=hash_of_parts(PARTS), corpora=["x"],
    )  # fmt: skip


def test_a_copy_is_read_as_it_was_written(tmp_path):
    path = write_copy(tmp_path, header(), PARTS)
    actual, content = verified(map_file(path))
    assert (actual, bytes(content)) == (header(), CONTENT)
    assert read_headers(tmp_path) == ([header()], [])
    path.unlink()
    assert bytes(content) == CONTENT


@pytest.mark.parametrize("place", ["checksum of the header", "header", "content", "last byte"])
def test_a_flipped_bit_is_detected(place, tmp_path):
    path = write_copy(tmp_path, header(), PARTS)
    content = bytearray(path.read_bytes())
    at = {"checksum of the header": 5, "header": 50, "content": len(content) - 600, "last byte": -1}[place]
    content[at] ^= 4
    with pytest.raises(DamagedError):
        verified(memoryview(content))


@pytest.mark.parametrize("size", [1, 33, 100, -1, -1200])
def test_a_truncated_copy_is_detected(size, tmp_path):
    content = write_copy(tmp_path, header(), PARTS).read_bytes()
    with pytest.raises(DamagedError):
        verified(memoryview(content[:size]))


def test_copies_that_cannot_be_read_are_named(tmp_path):
    write_copy(tmp_path, header(owner=1), PARTS)
    (tmp_path / "2-12-ab.copy").write_bytes(b"")
    (tmp_path / "3-12-ab.copy").write_bytes(b"no header\n")
    headers, damaged = read_headers(tmp_path)
    assert [each.owner for each in headers] == [1]
    assert [message.rsplit("/", 1)[1] for message in damaged] == [
        "2-12-ab.copy: its header is damaged",
        "3-12-ab.copy: its header is damaged",
    ]
    with pytest.raises(DamagedError, match="is empty"):
        map_file(tmp_path / "2-12-ab.copy")


def test_a_received_copy_gets_its_name_only_if_it_is_intact(tmp_path):
    content = write_copy(tmp_path, header(), PARTS).read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    damaged = content[:-1] + b"x"
    for chunks, key in (
        ([content[:700]], header().key),
        ([damaged], header().key),
        ([content], CopyKey(12, "ab", owner=4)),
    ):
        with pytest.raises(DamagedError):
            receive_copy(other, key, chunks)
        assert list(other.iterdir()) == []
    receive_copy(other, header().key, [content[:700], content[700:]])
    assert [path.name for path in other.iterdir()] == ["3-12-ab.copy"]
    assert read_headers(other) == ([header()], [])


def test_removal_keeps_other_owners_and_the_complete_step(tmp_path):
    for owner in (1, 11):
        for step in (4, 8):
            write_copy(tmp_path, header(owner, step), PARTS)
    remove_copies(tmp_path, keep=lambda name: name == CopyKey(8, "ab", 1).file, owner=1)
    assert {path.name for path in tmp_path.iterdir()} == {"1-8-ab.copy", "11-4-ab.copy", "11-8-ab.copy"}
    remove_copies(tmp_path, keep=lambda name: "-8-ab." in name)
    assert {path.name for path in tmp_path.iterdir()} == {"1-8-ab.copy", "11-8-ab.copy"}


def test_a_folder_that_others_can_write_is_refused(tmp_path):
    make_private_folder(tmp_path / "own")
    make_private_folder(tmp_path / "own")
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(tmp_path / "own")
    for name in ("open", "link"):
        with pytest.raises(UserError, match="only this user"):
            make_private_folder(tmp_path / name)


def test_the_file_system_is_that_of_the_deepest_mount():
    mounts = "overlay / overlay rw 0 0\ntmpfs /dev tmpfs rw 0 0\nshm /dev/shm ramfs rw 0 0\n"
    places = {"/dev/shm/zaya": "ramfs", "/dev/x": "tmpfs", "/data": "overlay"}
    assert {name: file_system_of(pathlib.Path(name), mounts) for name in places} == places


def test_keys_are_ordered_by_step():
    assert max(CopyKey(8, "a", 0), CopyKey(4, "z", 9)).step == 8
    assert dataclasses.astuple(header().key) == (12, "ab", 3)
