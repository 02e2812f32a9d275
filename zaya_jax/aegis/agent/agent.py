"""`zaya aegis agent`: watches one node for failures that the training processes cannot detect themselves.

The agent follows log files and the kernel's ring buffer, samples NICs, GPUs, disk and clock, and records
every line or change that a rule has a class for. The supervisor decides what to do about them.
"""

import glob
import os
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from zaya_jax.aegis.agent.kernel_log import PATH, KernelLog
from zaya_jax.aegis.agent.kubernetes_pod import PodActor, find_pod
from zaya_jax.aegis.agent.log_rules import RULES_FILE, LogRule, Rates, classify, load_rules
from zaya_jax.aegis.agent.node_sensors import StorageProbe, read_amd_smi, read_node
from zaya_jax.aegis.agent.sensor_changes import SENSOR_CLASSES, GpuCounts, NodeState, find_changes
from zaya_jax.aegis.agent.sightings import Sighting, write_sighting
from zaya_jax.aegis.doctor.host_facts import ROOT
from zaya_jax.errors import UserError
from zaya_jax.options import Parser
from zaya_jax.parallel.processes.process_group import host_name
from zaya_jax.platform.stop_signals import on_stop_signals
from zaya_jax.run_folder.names import SIGHTINGS_FOLDER
from zaya_jax.run_folder.tail import TailedFile

SAMPLE_SECONDS = 1.0
"""Interval between two samples of links and logs."""
SLOW_EVERY = 30
"""Number of samples between two readings of slow sensors: GPUs through amd-smi, and the disk."""


def main(argv: Sequence[str]) -> None:
    """Watches a node until a stop signal.

    Raises:
      UserError: if the run folder does not exist, or the rules lack a class.
    """
    options = _parser().parse_args(argv)
    if not options.run.is_dir():
        raise UserError(f"{options.run} is not a folder; an agent writes into the folder of a run")
    if options.dry_run and not options.kubernetes:
        raise UserError("--dry-run has no effect without --kubernetes: an agent only observes; omit it")
    actor = None
    if options.kubernetes:
        actor = PodActor(find_pod(os.environ), options.run, dry_run=options.dry_run)
    agent = Agent(options.run, load_rules(options.rules), logs=options.log, on_sighting=actor)
    with on_stop_signals(lambda _: agent.stop()):
        agent.watch(once=options.once)


def _parser() -> Parser:
    parser = Parser(
        "aegis agent",
        "Watch a node during a run: logs, kernel, NICs, GPUs, disk and clock. Run one agent on each node.",
        (
            "zaya aegis agent runs/tiny",
            "zaya aegis agent /shared/runs/zaya1_8b --log='/var/log/syslog'",
            "zaya aegis agent runs/tiny --once",
            "zaya aegis agent /shared/runs/zaya1_8b --kubernetes",
        ),
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="folder of the run")
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="FILE",
        help="log file or glob pattern to follow; may be repeated",
    )
    parser.add_argument("--rules", default=RULES_FILE, metavar="FILE", help="TOML file of log rules")
    parser.add_argument("--once", action="store_true", help="take two samples and exit")
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="cordon this node and delete this pod when the hardware fails: a JobSet has no supervisor",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="with --kubernetes: print what would be done, and do nothing"
    )
    return parser


class Agent:
    """Samples a node and records signs of failures in the run folder.

    Args:
      run_folder: folder of the run.
      rules: classes of log lines and sensor changes.
      logs: log files, or glob patterns of them, which are followed from their current ends.
      root: root folder of the node's files.
      kernel_log: device of the kernel's ring buffer.
      on_sighting: called with each recorded sighting; None if the supervisor acts on them.
      report: prints a line about what cannot be watched.

    Raises:
      UserError: if a class of the sensors has no rule.
    """

    def __init__(
        self,
        run_folder: pathlib.Path,
        rules: Sequence[LogRule],
        *,
        logs: Sequence[str] = (),
        root: pathlib.Path = ROOT,
        kernel_log: pathlib.Path = PATH,
        on_sighting: Callable[[Sighting], None] | None = None,
        report: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ):
        self._run_folder, self._rules, self._root = run_folder, rules, root
        self._on_sighting = on_sighting
        self._by_name = {rule.name: rule for rule in rules}
        # Now, and not when a sensor reports its first failure.
        if missing := [name for name in SENSOR_CLASSES if name not in self._by_name]:
            raise UserError(f'the rules have no class "{missing[0]}", which sensors report; add one')
        self._host = host_name(os.environ)
        self._rates, self._ended, self._num_samples = Rates(), threading.Event(), 0
        self._patterns, self._files = logs, {}
        # Lines from before the start may be about previous attempts.
        self._open_logs(from_end=True)
        self._kernel = _open_kernel_log(kernel_log, report)
        self._gpus: Mapping[str, GpuCounts] = {}
        folder = run_folder / SIGHTINGS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        # One file per host: the time stamp that the server sets is compared with this host's clock.
        self._storage = StorageProbe(run_folder, folder / f"{self._host}.clock")
        self._state: NodeState | None = None

    def stop(self) -> None:
        """Ends the watch. May be called from a signal handler or another thread."""
        self._ended.set()

    def watch(self, *, once: bool = False) -> None:
        """Samples the node until `stop` is called.

        Args:
          once: whether to return after two samples, the fewest that show a change.
        """
        while not self._ended.is_set():
            self.sample()
            if once and self._num_samples > 1:
                return
            # Unlike a sleep, this ends as soon as the agent is stopped.
            self._ended.wait(SAMPLE_SECONDS)

    def sample(self) -> None:
        """Reads all sensors and logs that are due."""
        if self._num_samples % SLOW_EVERY == 0:
            self._gpus = read_amd_smi()
            self._storage.start()
            # Files that are new, such as those of a later job step, are read from their beginning.
            self._open_logs(from_end=False)
        self._num_samples += 1
        state = read_node(self._root, self._gpus, self._storage)
        for change in find_changes(self._state, state) if self._state is not None else ():
            # Each error counts for the rate of its rule, although one sample may show many.
            for _ in range(change.times):
                self._record(self._by_name[change.name], change.source, change.evidence)
        self._state = state
        for source, line in self._new_lines():
            rule = classify(self._rules, line)
            if rule is not None:
                self._record(rule, source, line.strip())

    def _open_logs(self, *, from_end: bool) -> None:
        """Opens new log files. Lines that were written before the agent started are skipped."""
        for pattern in self._patterns:
            for name in glob.glob(pattern):
                if name not in self._files:
                    self._files[name] = TailedFile(pathlib.Path(name))
                    if from_end:
                        for _ in self._files[name].new_lines():
                            pass

    def _new_lines(self) -> Iterator[tuple[str, str]]:
        for name, file in self._files.items():
            for line in file.new_lines():
                # Programs may write any bytes to a log.
                yield name, line.decode(errors="backslashreplace")
        if self._kernel is not None:
            for line in self._kernel.new_lines():
                yield "kernel", line

    def _record(self, rule: LogRule, source: str, evidence: str) -> None:
        now = time.time()
        # A rule may need many lines within some time: a single correctable memory error is noise.
        if self._rates.add(rule, now):
            sighting = Sighting(now, self._host, rule.name, rule.action, source, evidence)
            write_sighting(self._run_folder, sighting)
            if self._on_sighting is not None:
                self._on_sighting(sighting)


def _open_kernel_log(path: pathlib.Path, report: Callable[[str], None]) -> KernelLog | None:
    try:
        return KernelLog(path)
    except OSError as error:
        report(f"agent: {path}: {error.strerror}: kernel messages are not watched; reading them needs root")
        return None
