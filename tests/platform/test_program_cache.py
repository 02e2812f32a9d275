import fcntl
import os
import types

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache import compilation_cache

from zaya_jax.platform import program_cache
from zaya_jax.platform.program_cache import (
    HASH,
    LOCK,
    PROGRAM,
    SETTINGS,
    VARIABLE,
    cache_folder,
    cached_programs,
)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Returns the folder of an empty cache. The tests' own cache of programs is off meanwhile."""
    before = {name: jax.config.values[name] for name in ("jax_compilation_cache_dir", *SETTINGS)}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    yield cache_folder()
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def hits():
    """Counts the programs that jax reads from a cache."""
    found = []

    def listen(event, **_):
        found.extend([event] if event == "/jax/compilation_cache/cache_hits" else [])

    jax.monitoring.register_event_listener(listen)
    yield found
    jax.monitoring.unregister_event_listener(listen)


def compile_and_run(number=1.0):
    """Compiles a program again, as a new process does, and returns its result."""
    return float(jax.jit(lambda x: jnp.sin(x) * number)(2.0))


def programs(folder):
    return sorted(folder.glob(f"*{PROGRAM}"))


def test_a_second_start_reads_what_the_first_one_compiled(folder, hits):
    with cached_programs():
        first = compile_and_run()
    (program,) = programs(folder)
    assert program.with_name(program.name + HASH).is_file()
    assert not hits
    with cached_programs():
        assert compile_and_run() == first
    assert len(hits) == 1


def test_programs_after_the_block_are_not_stored(folder):
    with cached_programs():
        pass
    compile_and_run()
    assert not programs(folder)
    assert jax.config.values["jax_compilation_cache_dir"] is None


@pytest.mark.parametrize("damage", ["bit", "cut", "no hash"])
def test_a_damaged_program_is_compiled_again(folder, hits, damage):
    with cached_programs():
        first = compile_and_run()
    (program,) = programs(folder)
    content = bytearray(program.read_bytes())
    if damage == "bit":
        content[len(content) // 2] ^= 1
        program.write_bytes(content)
    elif damage == "cut":
        program.write_bytes(content[:-1])
    else:  # the process was killed while it wrote the program
        program.with_name(program.name + HASH).unlink()
    with cached_programs():
        assert not programs(folder)
        assert compile_and_run() == first
    assert not hits
    with cached_programs():
        assert compile_and_run() == first
    assert len(hits) == 1


def test_the_oldest_programs_are_removed(folder, monkeypatch):
    with cached_programs():
        compile_and_run(1.0)
    (old,) = programs(folder)
    os.utime(old, (1, 1))
    with cached_programs():
        compile_and_run(2.0)
    monkeypatch.setattr(program_cache, "MAX_BYTES", old.stat().st_size * 3 // 2)
    with cached_programs():
        (left,) = programs(folder)
    assert left != old
    assert sorted(folder.iterdir()) == sorted([folder / LOCK, left, left.with_name(left.name + HASH)])


def test_a_process_works_without_a_cache_that_another_one_uses(folder):
    with cached_programs():
        pass
    with (folder / LOCK).open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with cached_programs():
            compile_and_run()
    assert not programs(folder)


def test_a_failed_start_records_nothing_and_keeps_its_lock(folder):
    def start():
        with cached_programs():
            compile_and_run()
            raise KeyError

    with pytest.raises(KeyError):
        start()
    assert len(programs(folder)) == 1
    assert not [*folder.glob(f"*{HASH}")]
    with (folder / LOCK).open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_folder_that_cannot_be_made_is_reported(monkeypatch, tmp_path, caplog):
    (tmp_path / "file").touch()
    monkeypatch.setenv(VARIABLE, str(tmp_path / "file"))
    with cached_programs():
        compile_and_run()
    assert "compiled programs are not cached" in caplog.text


def test_programs_on_a_full_disk_are_not_recorded(folder, monkeypatch):
    monkeypatch.setattr(program_cache.shutil, "disk_usage", lambda _: types.SimpleNamespace(free=0))
    with cached_programs():
        compile_and_run()
    assert not [*folder.glob(f"*{HASH}")]
    with cached_programs():
        assert not programs(folder)


def test_an_error_at_the_end_of_a_start_is_reported(folder, monkeypatch, caplog):
    def fail(_):
        raise OSError("no space")

    monkeypatch.setattr(program_cache, "_hash_of", fail)
    with cached_programs():
        compile_and_run()
    assert "compiled programs are not cached: no space" in caplog.text


@pytest.mark.parametrize("setting", ["empty", "jax", "disabled"])
def test_no_cache(monkeypatch, tmp_path, setting):
    if setting == "empty":
        monkeypatch.setenv(VARIABLE, "")
    elif setting == "jax":
        jax.config.update("jax_compilation_cache_dir", str(tmp_path / "jax"))
    else:
        jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert cache_folder() is None
        with cached_programs():  # changes nothing
            assert not [*tmp_path.iterdir()]
    finally:
        jax.config.update("jax_enable_compilation_cache", True)


def test_another_number_of_threads_has_another_folder(folder, monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    assert cache_folder() != folder
