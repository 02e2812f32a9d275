"""Processes that acquire a run's lock by command: one command per line of standard input.

Without JAX, so that many can be started and can fork; of `zaya_jax` they load only the files that they need.
"""

import contextlib
import json
import multiprocessing
import pathlib
import random
import signal
import sys
import types

LIMIT_SECONDS = 60


def load(package: pathlib.Path):
    for name, folder in (("zaya_jax", package), ("zaya_jax.checkpoint", package / "checkpoint")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    from zaya_jax.checkpoint import lock

    return lock


def hold(lock, folder: str) -> None:
    """Prints the result of each command: "check", "empty" or another."""
    try:
        with lock.run_lock(folder) as held:
            print("held", flush=True)
            for line in sys.stdin:
                actions = {"check\n": held.check, "empty\n": held.empty_folder}
                actions.get(line, lambda: None)()
                print("done", flush=True)
    except ValueError as error:
        print(error)


def as_on_a_host_of_its_own(lock, folder: str) -> None:
    """Simulates another host whose file system does not share locks."""
    lock.this_kernel = lambda: "another"
    lock.BEAT_SECONDS = 0.05
    lock.fcntl = types.SimpleNamespace(flock=lambda *_: None, LOCK_EX=0, LOCK_NB=0)
    hold(lock, folder)


def with_a_quick_heart(lock, folder: str) -> None:
    lock.BEAT_SECONDS = 0.01
    hold(lock, folder)


def together(lock, function, *, num_processes: int) -> list:
    """Returns the results of a function in processes that start it at the same time after each barrier."""
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(num_processes), context.Queue()
    # Locks do not depend on what survives a power failure, and 300 fsyncs can take a minute on a busy disk.
    lock.durable.os.fsync = lambda _: None

    def run(index: int) -> None:
        signal.alarm(LIMIT_SECONDS)
        results.put(function(index, barrier))

    processes = [context.Process(target=run, args=(i,)) for i in range(num_processes)]
    for process in processes:
        process.start()
    found = [results.get(timeout=LIMIT_SECONDS) for _ in processes]
    for process in processes:
        process.join(LIMIT_SECONDS)
    return found


def start_at_once(lock, folder: str) -> None:
    """Prints how many of two processes acquired each of some folders, new ones and ones with a dead process's
    lock.
    """
    lock.RETRY_SECONDS = 0.2
    folders = [pathlib.Path(folder, str(number)) for number in range(20)]
    for dead in folders[::2]:
        dead.mkdir(parents=True)
        (dead / lock.LOCK_FILE).write_text(
            json.dumps({"host": "here", "pid": 1, "since": "then", "kernel": lock.this_kernel()})
        )

    def start(_, barrier):
        won = []
        for each in folders:
            barrier.wait()
            with contextlib.ExitStack() as held:
                try:
                    held.enter_context(lock.run_lock(each))
                except ValueError:
                    won.append(0)
                else:
                    won.append(1)
                barrier.wait()  # no process leaves before all have tried
        return won

    print(json.dumps([sum(each) for each in zip(*together(lock, start, num_processes=2), strict=True)]))


def come_and_go(lock, folder: str) -> None:
    """Prints how often each of three processes held the lock, and any overlap, which must not occur."""
    inside = pathlib.Path(folder).with_name("inside")
    lock.RETRY_SECONDS, lock._POLL_SECONDS = 0.05, 0.001

    def work(index, _):
        numbers, times, met = random.Random(index), 0, 0
        while times < 50:
            with contextlib.suppress(ValueError), lock.run_lock(folder) as held:
                met += inside.exists()
                inside.touch()
                if numbers.random() < 0.3:
                    held.empty_folder()
                elif numbers.random() < 0.3:
                    (held.folder / "file").touch()
                held.check()
                inside.unlink()
                times += 1
        return times, met

    print(json.dumps(together(lock, work, num_processes=3)))


if __name__ == "__main__":
    signal.alarm(LIMIT_SECONDS)
    actions = (hold, as_on_a_host_of_its_own, with_a_quick_heart, start_at_once, come_and_go)
    {each.__name__: each for each in actions}[sys.argv[2]](load(pathlib.Path(sys.argv[1])), sys.argv[3])
