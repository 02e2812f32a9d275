"""Conversions that are killed by SIGKILL at random moments; prints the results as JSON.

It is a separate process because it forks, which a process with JAX's threads must not do.
"""

import json
import os
import pathlib
import random
import shutil
import signal
import sys
import time

from small_weights import contents, random_variables, small_config

import zaya_jax
from zaya_jax.convert.stream import check_checksums
from zaya_jax.files.durable import CHECKSUMS

MAX_KILLS, MIN_RESUMED = 40, 2


def start(source: pathlib.Path, target: pathlib.Path, *, fsync_s: float = 0.0) -> int:
    """Converts in a child process on a slowed disk, so that all moments are equally likely."""
    child = os.fork()
    if child:
        return child
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    fsync = os.fsync

    def slow_fsync(descriptor: int) -> None:
        time.sleep(fsync_s)
        fsync(descriptor)

    os.fsync = slow_fsync
    try:
        from zaya_jax.cli import main

        main(["convert", str(source), str(target), "--max-shard-size", "4KB"])
    except BaseException:
        os._exit(1)
    os._exit(0)


def wait(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stage(target: pathlib.Path) -> str:
    """Returns how far a killed conversion was."""
    aside = target.with_name(target.name + ".partial")
    if target.exists():
        return "finished" if not aside.exists() else "renamed"
    if not (aside / "journal").exists():
        return "nothing yet" if not aside.exists() else "begun"
    if (aside / "content" / CHECKSUMS).exists():
        return "all files done"
    return f"some files done ({files_done(target) > 0})"


def files_done(target: pathlib.Path) -> int:
    """Returns the number of files that a conversion has noted as done."""
    journal = target.with_name(target.name + ".partial") / "journal"
    return max(0, len(journal.read_text().splitlines()) - 1) if journal.exists() else 0


def wait_between_files(target: pathlib.Path) -> None:
    """Waits until some files are done: how long that takes differs between two conversions on a busy disk."""
    end = time.monotonic() + 60
    while not (files_done(target) or target.exists()):
        assert time.monotonic() < end, "the conversion wrote no file in a minute"
        time.sleep(0.001)


def looks_whole(target: pathlib.Path, expected: dict[str, bytes]) -> bool:
    """Checks that a folder with the final name equals the complete result."""
    return contents(target) == expected and check_checksums(target) is None


def try_direction(source: pathlib.Path, work: pathlib.Path, seed: int, min_kills: int) -> dict:
    """Kills a conversion, checks the folder, and resumes.

    Repeats this at least `min_kills` times, and until some kills hit between two files. Every second kill
    waits for that; the others come at any moment.
    """
    target = work / "target"
    begin = time.monotonic()
    assert wait(start(source, target, fsync_s=0.003)) == 0
    usual = time.monotonic() - begin
    expected = contents(target)
    shutil.rmtree(target)
    numbers = random.Random(seed)
    actual: dict[str, int] = {}
    false, resumed, kill = [], 0, 0
    while kill < min_kills or (resumed < MIN_RESUMED and kill < MAX_KILLS):
        kill += 1
        child = start(source, target, fsync_s=0.003)
        if kill % 2:
            time.sleep(numbers.uniform(0, usual))
        else:
            wait_between_files(target)
        os.kill(child, signal.SIGKILL)
        wait(child)
        where = stage(target)
        actual[where] = actual.get(where, 0) + 1
        if target.exists() and not looks_whole(target, expected):
            false.append(kill)
        if not target.exists():
            done = files_done(target)
            assert wait(start(source, target)) == 0
            resumed += done > 0
            if not looks_whole(target, expected):
                false.append(kill)
        shutil.rmtree(target)
        shutil.rmtree(work / "target.partial", ignore_errors=True)
    return {"kills": kill, "stages": actual, "false": false, "resumed": resumed}


def main() -> None:
    work, min_kills = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    config = small_config()
    zaya_jax.save_pytorch(work / "native", zaya_jax.Zaya(config), random_variables(config, 0))
    assert wait(start(work / "native", work / "run")) == 0
    report = {
        "to a run": try_direction(work / "native", work, 0, min_kills),
        "to PyTorch": try_direction(work / "run", work, 1, min_kills),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
