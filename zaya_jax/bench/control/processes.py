"""Light processes of one machine that start, agree and commit as those of a run, with one CPU device each.

`zaya bench control` starts it as `python -m zaya_jax.bench.control.processes COUNT ROUNDS WRITERS FOLDER`,
and it writes FOLDER/times.json. It imports everything once, and forks the processes, which share that memory.
"""

import contextlib
import json
import multiprocessing
import pathlib
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from zaya_jax.bench.control.phases import (
    COMMIT,
    DEVICES,
    SAME,
    SERVICE,
    SHARED_PHASES,
    START,
    STEP,
    STOP,
    described_files,
    writing_processes,
)
from zaya_jax.checkpoint import commit_together
from zaya_jax.checkpoint.format.manifest import Files, commit
from zaya_jax.files import durable
from zaya_jax.parallel.processes import coordination_service, hosts
from zaya_jax.parallel.processes.consistency import require_same
from zaya_jax.parallel.processes.process_group import ProcessGroup, find_process_group
from zaya_jax.parallel.processes.stop_agreement import agree_on_step, request_stop, wait_for_request
from zaya_jax.parallel.processes.tree.exchanges import first_known

TIMES_FILE = "times.json"
LIMIT_SECONDS = 300.0
# The others come when process 0 listens and the process of jax's service has started, and before process 0
# reports after a second that they are missing.
_LEAD_SECONDS = 0.7
# Time in which nothing happens before and after a phase, so that messages of the next one are not counted.
_QUIET_SECONDS = 0.1
_QUIET_SECONDS_PER_PROCESS = 0.002
_SMALL_EXCHANGES, _LARGE_EXCHANGES, _LARGE_BYTES = 200, 10, 2**20
_PAUSE_SECONDS = 0.005
_CONFIG = {f"section.field_{number}": str(number) for number in range(300)}


class Recorder:
    """Times the phases in one process.

    Args:
      num_processes: number of processes.

    Attributes:
      spans: begin and end of each visit to each phase, on the clock of the machine.
      work: messages, bytes and CPU seconds of this process in each visit.
    """

    def __init__(self, num_processes: int):
        self._quiet_seconds = _QUIET_SECONDS + num_processes * _QUIET_SECONDS_PER_PROCESS
        self.spans: dict[str, list[tuple[float, float]]] = {name: [] for name in SHARED_PHASES}
        self.work: dict[str, list[tuple[int, int, float]]] = {name: [] for name in SHARED_PHASES}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Times a phase; all processes begin it when they are idle."""
        hosts.meet("next phase")
        # At once: another process may wake up sooner than this one.
        before = hosts.traffic()
        time.sleep(self._quiet_seconds)
        cpu, begin = time.process_time(), time.monotonic()
        yield
        end, after = time.monotonic(), hosts.traffic()
        self.spans[name].append((begin, end))
        cpu = time.process_time() - cpu
        self.work[name].append((after.messages - before.messages, after.num_bytes - before.num_bytes, cpu))
        time.sleep(self._quiet_seconds)


def main(argv: Sequence[str]) -> None:
    """Measures all phases in a number of processes."""
    (count, rounds, most_writers), folder = map(int, argv[:3]), pathlib.Path(argv[3])
    # No thread of jax runs yet: it starts them with its devices and its service.
    warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
    context = multiprocessing.get_context("fork")
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    # Forked processes share the imports: 12 MB each instead of 150.
    ready, results = context.Barrier(count), context.SimpleQueue()
    # With derived addresses of parents, as under `zaya launch`.
    groups = [
        find_process_group({}, coordinator=address, num_processes=count, process=number)
        for number in range(count)
    ]
    writers = writing_processes(count, most_writers)
    processes = [
        context.Process(target=_run, args=(group, rounds, folder, writers, ready, results))
        for group in groups
    ]
    for process in processes:
        process.start()
    # Read before the processes are joined: one with a full pipe would never end.
    records = sorted((results.get() for _ in processes), key=lambda each: each["process"])
    for process in processes:
        process.join()
    # Durable, since the program that started this one reads it after its end.
    durable.write(folder / TIMES_FILE, json.dumps(summarize(records)))


def summarize(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the cost of each phase, medians over its visits, from the records of all processes."""
    phases = {}
    for name in SHARED_PHASES:
        seconds = []
        for spans in zip(*(record["spans"][name] for record in records), strict=True):
            # A stop begins with its request, everything else when the last process is there.
            begin = spans[-1][0] if name == STOP else max(begin for begin, _ in spans)
            seconds.append(max(end for _, end in spans) - begin)
        # Process 0 alone: it is the one that all others depend on.
        work = zip(*records[0]["work"][name], strict=True)
        messages, num_bytes, cpu_seconds = map(statistics.median, work)
        phases[name] = {
            "seconds": statistics.median(seconds),
            "messages": int(messages),
            "num_bytes": int(num_bytes),
            "cpu_seconds": cpu_seconds,
            "service_cpu_seconds": records[0]["service_cpu"] if name == SERVICE else 0.0,
        }
    others = [record["start_cpu"] for record in records[1:]]
    return {
        "phases": phases,
        "start_cpu": statistics.median(each[0] for each in others),
        "service_cpu": statistics.median(each[1] for each in others),
        "memory_bytes": statistics.median(record["memory_bytes"] for record in records),
        "messages": records[0]["messages"],
    }


def _run(
    group: ProcessGroup, rounds: int, folder: pathlib.Path, writers: range, ready: Any, results: Any
) -> None:
    recorder = Recorder(group.num_processes)
    ready.wait()
    if group.process > 0:
        time.sleep(_LEAD_SECONDS)
    with hosts.joined(group, limit_seconds=LIMIT_SECONDS):
        start_cpu = _record_start(recorder)
        service_cpu = 0.0 if group.process else _cpu_seconds(coordination_service.state().service.pid)
        with recorder.phase(DEVICES):
            jax.devices()
        # The farthest from process 0 requests the stop.
        is_last = group.process == group.num_processes - 1
        for _ in range(rounds):
            with recorder.phase(SAME):
                require_same("config", _CONFIG)
            with recorder.phase(COMMIT):
                _commit(folder, described_files(group.process) if group.process in writers else {})
        messages = _cost_of_messages() if group.num_processes == 2 else None
        # Once: a run stops once.
        with recorder.phase(STOP):
            if is_last:
                request_stop("signal")
            assert wait_for_request(limit_seconds=LIMIT_SECONDS)
            agree_on_step(group.process)
    results.put(
        {
            "process": group.process,
            "spans": recorder.spans,
            "work": recorder.work,
            "start_cpu": start_cpu,
            "service_cpu": service_cpu,
            "memory_bytes": _private_bytes(),
            "messages": messages,
        }
    )


def _record_start(recorder: Recorder) -> tuple[float, float]:
    """Records the phases of the start; returns the CPU seconds of their parts in this process."""
    cost = hosts.start_cost()
    assert cost is not None
    met = cost.begin + cost.rendezvous
    recorder.spans[START].append((cost.begin, met))
    recorder.spans[SERVICE].append((met, met + cost.service))
    recorder.work[START].append((cost.messages, 0, cost.rendezvous_cpu))
    recorder.work[SERVICE].append((0, 0, cost.service_cpu))
    return cost.rendezvous_cpu, cost.service_cpu


def _commit(folder: pathlib.Path, files: Files) -> None:
    """Commits a checkpoint whose files are described but do not exist: the disk is measured elsewhere."""

    def publish(described: list[Files]) -> None:
        aside = durable.temporary_path(folder / str(STEP))
        durable.make_folder(aside)
        commit(aside, STEP, {name: values for files in described for name, values in files.items()})
        durable.publish(aside, folder / str(STEP), replace=True)

    commit_together(lambda: files, publish)


def _cost_of_messages() -> dict[str, float]:
    """Measures small and large messages between this process and the only other one.

    Returns:
      "one_way": seconds until a small message has arrived and was handled. "per_byte": CPU seconds at either
      end for a byte of a message.
    """
    rounds = []
    for _ in range(_SMALL_EXCHANGES):
        # Messages of a run find a process that was idle.
        time.sleep(_PAUSE_SECONDS)
        begin = time.monotonic()
        hosts.meet("small")
        rounds.append(time.monotonic() - begin)
    # The difference of a large and a small message is the cost of its bytes.
    cpu = []
    for size in (1, _LARGE_BYTES):
        begin, content = time.process_time(), "x" * size
        for _ in range(_LARGE_EXCHANGES):
            hosts.reduce("large", content, first_known)
        # In each exchange this process sends one message and receives one.
        cpu.append((time.process_time() - begin) / (2 * _LARGE_EXCHANGES))
    # A message to the other process and one back.
    return {
        "one_way": statistics.median(rounds) / 2,
        "per_byte": max(0.0, cpu[1] - cpu[0]) / _LARGE_BYTES,
    }


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU time of another process."""
    # Its clock, as Linux numbers them (clock_getcpuclockid): ticks in /proc are 10 ms, too coarse.
    return time.clock_gettime((~pid << 3) | 2)


def _private_bytes() -> int:
    """Returns the memory of this process that it does not share with others."""
    # Not the resident memory, which counts shared pages in each process.
    lines = pathlib.Path("/proc/self/smaps_rollup").read_text().splitlines()
    sizes = [line.split() for line in lines if line.startswith("Private_")]
    return 1024 * sum(int(size) for _, size, _ in sizes)


if __name__ == "__main__":
    main(sys.argv[1:])
