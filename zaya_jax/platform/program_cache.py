"""Compiled programs on disk: a second start of a run reads them instead of compiling again.

jax's persistent cache does the work; its key contains the program, the compiler's version, options and flags.
But it neither writes atomically nor verifies what it reads, so that a damaged file could run as another
program. Here only one process at a time uses a folder, while it starts. At the beginning it removes files
that differ from their recorded hashes, and at the end it records the hashes of new files.
"""

import contextlib
import fcntl
import logging
import os
import pathlib
import platform
import shutil
from collections.abc import Iterator

import jax
import xxhash
from jax.experimental.compilation_cache import compilation_cache

VARIABLE = "ZAYA_PROGRAM_CACHE"
"""Environment variable: folder of the cache; empty for none. By default it is in the user's cache folder."""
MAX_BYTES = 256 * 2**20
"""Maximum size of a folder at the beginning of a start. The programs of configs/tiny.py have 0.9 MB."""
PROGRAM, HASH, LOCK = "-cache", ".xxh3", "lock"
"""Ending of jax's files, ending of the hash of each, and the locked file."""
SETTINGS = {
    # Small programs too: a start compiles 25 of them.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
    # Otherwise XLA would store tuning results in the folder, which have no hashes.
    "jax_persistent_cache_enable_xla_caches": "none",
}


@contextlib.contextmanager
def cached_programs() -> Iterator[None]:
    """Reads programs from the cache in a block, and adds those that the block compiles.

    If another process uses the folder, or it cannot be written, all programs are compiled. After an exception
    none is added, and the folder stays locked until the process ends, because a thread may still compile.
    """
    folder = cache_folder()
    lock = None if folder is None else _open(folder)
    if folder is None or lock is None:
        yield
        return
    before = {name: jax.config.values[name] for name in SETTINGS}
    _configure(str(folder), SETTINGS)
    yield
    _configure(None, before)
    _record_hashes(folder)
    os.close(lock)


def cache_folder() -> pathlib.Path | None:
    """Returns the folder for this kind of machine; None if there is no cache, or jax has its own."""
    named = os.environ.get(VARIABLE)
    if named == "" or jax.config.values["jax_compilation_cache_dir"] is not None:
        return None
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    root = pathlib.Path(named) if named else cache / "zaya_jax" / "programs"
    return root.absolute() / _machine_kind()


def _machine_kind() -> str:
    """Returns a name for processors with the same instructions and number of threads.

    Several machines may share a home folder, and jax's key contains neither: code for one could crash
    another, or divide its work among other threads.
    """
    cpu = pathlib.Path("/proc/cpuinfo")
    about = cpu.read_text().partition("\n\n")[0] if cpu.exists() else platform.processor()
    lines = [line for line in about.splitlines() if line.startswith(("flags", "Features", "model"))]
    # XLA has a thread for each of these cores, unless NPROC gives their number.
    threads = str(len(os.sched_getaffinity(0))), os.environ.get("NPROC", "")
    description = "\n".join([platform.machine(), *lines, *threads])
    return xxhash.xxh3_128_hexdigest(description.encode())[:12]


def _open(folder: pathlib.Path) -> int | None:
    """Locks a folder, and removes damaged and old programs.

    Returns:
      An open file that holds the lock; None if another process holds it, or the folder cannot be used.
    """
    with _reporting_errors(), contextlib.ExitStack() as stack:
        # Only for the user: its files are code that the process runs.
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        _remove_damaged(folder)
        _remove_oldest(folder)
        stack.pop_all()  # the lock stays open
        return lock
    return None


@contextlib.contextmanager
def _reporting_errors() -> Iterator[None]:
    """Reports a disk that is full, read-only or broken: a run needs no cache."""
    try:
        yield
    except OSError as error:
        logging.getLogger(__name__).warning("compiled programs are not cached: %s", error)


def _remove_damaged(folder: pathlib.Path) -> None:
    """Removes programs without their hash, and hashes without a program."""
    for file in folder.glob(f"*{PROGRAM}"):
        recorded = _hash_file(file)
        if not recorded.exists() or recorded.read_text() != _hash_of(file):
            file.unlink()
    for recorded in folder.glob(f"*{HASH}"):
        if not recorded.with_suffix("").exists():
            recorded.unlink()


def _remove_oldest(folder: pathlib.Path) -> None:
    files = sorted(folder.glob(f"*{PROGRAM}"), key=lambda file: file.stat().st_mtime, reverse=True)
    total = 0
    for file in files:
        total += file.stat().st_size
        if total > MAX_BYTES:
            file.unlink()
            _hash_file(file).unlink()


def _record_hashes(folder: pathlib.Path) -> None:
    """Records the hashes of new programs; the next start removes those without."""
    with _reporting_errors():
        # On a full disk jax may have written a part of a program.
        if shutil.disk_usage(folder).free < MAX_BYTES:
            return
        for file in folder.glob(f"*{PROGRAM}"):
            if not _hash_file(file).exists():
                _hash_file(file).write_text(_hash_of(file))


def _hash_file(file: pathlib.Path) -> pathlib.Path:
    return file.with_name(file.name + HASH)


def _hash_of(file: pathlib.Path) -> str:
    return xxhash.xxh3_128_hexdigest(file.read_bytes())


def _configure(folder: str | None, settings: dict[str, object]) -> None:
    for name, value in {"jax_compilation_cache_dir": folder, **settings}.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # jax reads the folder once
