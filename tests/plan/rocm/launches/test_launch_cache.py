"""The folder of compiled launches: entries, damage, age and keys. Nothing is compiled."""

import os
import pathlib
import time

import pytest

from zaya_jax.plan.rocm.launches.cache import (
    FOLDER_VARIABLE,
    CompiledLaunch,
    default_folder,
    delete_unused,
    key_of,
    read_entry,
    write_entry,
)

ENTRY = CompiledLaunch(kernel="k", code=bytes(range(256)), grid=(3, 2, 1), threads=256, lds_bytes=1024)
KEY = key_of(b"program", jaxlib="1")


def test_an_entry_is_read_as_it_was_written(tmp_path):
    folder = tmp_path / "new"
    assert read_entry(folder, KEY) is None
    write_entry(folder, KEY, ENTRY)
    assert read_entry(folder, KEY) == ENTRY
    assert [path.name for path in folder.iterdir()] == [KEY]


def test_any_damage_makes_an_entry_absent(tmp_path):
    write_entry(tmp_path, KEY, ENTRY)
    file = tmp_path / KEY
    whole = file.read_bytes()
    damaged = [b"", whole[:10], whole[:-1], whole + b" ", b"\xff" * len(whole)]
    for at in range(0, len(whole), 7):
        damaged.append(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    for content in damaged:
        file.write_bytes(content)
        assert read_entry(tmp_path, KEY) is None
    write_entry(tmp_path, KEY, ENTRY)
    assert read_entry(tmp_path, KEY) == ENTRY


def test_all_conditions_are_in_the_key():
    conditions = {"jaxlib": "0.10.2", "plugin": ("a-1",), "options": {"level": 3}}
    keys = {key_of(b"program", **conditions), key_of(b"another", **conditions)}
    keys |= {
        key_of(b"program", **(conditions | change))
        for change in ({"jaxlib": "0.12.0"}, {"plugin": ("a-2",)}, {"options": {"level": 0}})
    }
    assert len(keys) == 5
    assert key_of(b"program", **conditions) == key_of(b"program", **dict(reversed(conditions.items())))


def test_entries_that_nobody_reads_are_deleted(tmp_path):
    for key in ("read", "unread"):
        write_entry(tmp_path, key, ENTRY)
        os.utime(tmp_path / key, times=(time.time() - 1000,) * 2)
    read_entry(tmp_path, "read")
    delete_unused(tmp_path, seconds=900.0)
    assert [path.name for path in tmp_path.iterdir()] == ["read"]


@pytest.mark.parametrize(("value", "folder"), [("", None), ("/somewhere", pathlib.Path("/somewhere"))])
def test_the_environment_selects_the_folder(monkeypatch, value, folder):
    monkeypatch.setenv(FOLDER_VARIABLE, value)
    assert default_folder() == folder


def test_the_folder_is_among_the_users_caches(monkeypatch):
    monkeypatch.delenv(FOLDER_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == pathlib.Path("/caches/zaya_jax/compiled_kernels")
