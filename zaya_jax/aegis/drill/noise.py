"""Noise as other users of a machine make it: slow steps, a slow disk, busy cores."""

import contextlib
import os
import pathlib
import random
import subprocess
import sys
import threading
from collections.abc import Iterator

from zaya_jax.aegis.drill.campaign import Campaign

MAX_SECONDS = 3.0
"""Maximum delay of a slow step; below the limit of the watchdog."""


def slow_steps(campaign: Campaign) -> str:
    """Returns occasional slow steps, which are not stalls, in the words of `ZAYA_FAULT`."""
    generator, step, words = random.Random(campaign.seed), 30, []
    while step < campaign.num_steps:
        seconds = generator.uniform(0.5, MAX_SECONDS)
        words.append(
            f"hang@step={step}:process={generator.randrange(campaign.processes)}:seconds={seconds:.2f}"
        )
        step += generator.randint(20, 200)
    return ",".join(words)


@contextlib.contextmanager
def busy_machine(folder: pathlib.Path) -> Iterator[None]:
    """Loads the disk and the cores from time to time."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=work, args=(folder, ended), daemon=True) for work in (_use_disk, _use_cores)
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        # The threads remove their file and end their processes before they return.
        for thread in threads:
            thread.join()


def _use_disk(folder: pathlib.Path, ended: threading.Event) -> None:
    file = folder / "noise"
    while not ended.wait(random.uniform(2, 20)):
        # fsync, so that checkpoints compete with it for the disk.
        command = ["dd", "if=/dev/zero", f"of={file}", "bs=1M", "count=256", "conv=fsync", "status=none"]
        subprocess.run(command, check=False)
    file.unlink(missing_ok=True)


def _use_cores(folder: pathlib.Path, ended: threading.Event) -> None:
    del folder
    while not ended.wait(random.uniform(2, 30)):
        command = [sys.executable, "-c", "while True: pass"]
        # Processes and not threads, which would share one core under Python's lock.
        busy = [subprocess.Popen(command) for _ in range(os.cpu_count() or 1)]
        # Not a sleep, so that the end of the drill ends the load at once.
        ended.wait(random.uniform(2, 15))
        for each in busy:
            each.kill()
            each.wait()
