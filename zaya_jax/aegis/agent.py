"""`zaya aegis agent`: one on each node, beside the processes of a run, that sees what they cannot know.

It follows logs and the kernel's ring buffer, samples NICs, GPUs, disk and clock, and writes down what a rule
has a class for. What becomes of that is the supervisor's to decide.
"""

import glob
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from zaya_jax.aegis.following import Followed
from zaya_jax.aegis.host_readings import ROOT
from zaya_jax.aegis.journal import SIGHTINGS_FOLDER
from zaya_jax.aegis.kernel_log import PATH, KernelLog
from zaya_jax.aegis.node_readings import Storage, read_amd_smi, read_node
from zaya_jax.aegis.own_pod import OnOwn, own_pod
from zaya_jax.aegis.rules import RULES_FILE, LogRule, Rates, classify, load_rules
from zaya_jax.aegis.sensors import SENSED, GpuCounts, Node, NodeChange, changes
from zaya_jax.aegis.sightings import Sighting, write_sighting
from zaya_jax.options import Parser
from zaya_jax.parallel.process_group import host_name

LOOK_SECONDS = 1.0
"""Between two looks at links and logs."""
SLOW_EVERY = 30
"""Looks between two at what costs more: GPUs by their own tool, and the disk."""


def main(argv: Sequence[str]) -> None:
    """Watches a node until it is told to end.

    Raises:
      ValueError: for a folder that is not there, or rules that lack a class.
    """
    options = _parser().parse_args(argv)
    if not options.run.is_dir():
        raise ValueError(f"{options.run} is no folder; an agent writes into the folder of a run")
    if options.dry_run and not options.kubernetes:
        raise ValueError("--dry-run is of no use without --kubernetes: an agent only looks")
    on_own = OnOwn(own_pod(os.environ), options.run, dry_run=options.dry_run) if options.kubernetes else None
    agent = Agent(options.run, load_rules(options.rules), logs=options.log, act=on_own)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: agent.stop())
    agent.watch(once=options.once)


def _parser() -> Parser:
    parser = Parser(
        "aegis agent",
        "Watches a node beside a run: its logs, the kernel, NICs, GPUs, disk and clock. One on each node.",
        (
            "zaya aegis agent runs/tiny",
            "zaya aegis agent /shared/runs/zaya1_8b --log='/var/log/syslog'",
            "zaya aegis agent runs/tiny --once",
            "zaya aegis agent /shared/runs/zaya1_8b --kubernetes",
        ),
    )
    parser.add_argument("run", type=pathlib.Path, metavar="RUN", help="the folder of the run")
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="FILE",
        help="to follow, or a pattern of files; any number",
    )
    parser.add_argument("--rules", default=RULES_FILE, metavar="FILE", help="TOML (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="two looks, and the end")
    parser.add_argument(
        "--kubernetes",
        action="store_true",
        help="act, as nobody supervises a JobSet: cordon this node and leave it where its hardware fails",
    )
    parser.add_argument("--dry-run", action="store_true", help="with --kubernetes: tell what it would do")
    return parser


class Agent:
    """Watches a node.

    Args:
      run_folder: in which it writes.
      rules: that say what means what.
      logs: files or patterns of them that are followed from their ends.
      root: of what is read of the node.
      kernel_log: the device of the kernel's ring buffer.
      act: is given each sighting, where nobody else acts by them.
      say: tells what cannot be watched.

    Raises:
      ValueError: if a class that sensors tell of has no rule.
    """

    def __init__(
        self,
        run_folder: pathlib.Path,
        rules: Sequence[LogRule],
        *,
        logs: Sequence[str] = (),
        root: pathlib.Path = ROOT,
        kernel_log: pathlib.Path = PATH,
        act: Callable[[Sighting], None] | None = None,
        say: Callable[[str], None] = lambda line: print(line, file=sys.stderr),
    ):
        self._run_folder, self._rules, self._root, self._act = run_folder, rules, root, act
        self._by_name = {rule.name: rule for rule in rules}
        if missing := [name for name in SENSED if name not in self._by_name]:
            raise ValueError(f"the rules have no class {missing[0]}, of which sensors tell; add one")
        self._host = host_name(os.environ)
        self._rates, self._ended, self._looks = Rates(), threading.Event(), 0
        self._logs, self._followed = logs, {}
        self._find_logs(from_end=True)
        self._kernel = _open_kernel_log(kernel_log, say)
        self._gpus: Mapping[str, GpuCounts] = {}
        folder = run_folder / SIGHTINGS_FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        self._storage = Storage(run_folder, folder / f"{self._host}.clock")
        self._node: Node | None = None

    def stop(self) -> None:
        """Ends the watch, from a handler of signals or another thread."""
        self._ended.set()

    def watch(self, *, once: bool = False) -> None:
        """Looks again and again, until it is told to end, or twice."""
        while not self._ended.is_set():
            self.look()
            if once and self._looks > 1:
                return
            self._ended.wait(LOOK_SECONDS)

    def look(self) -> None:
        """One look at everything that is due."""
        if self._looks % SLOW_EVERY == 0:
            self._gpus = read_amd_smi()
            self._storage.ask()
            self._find_logs(from_end=False)
        self._looks += 1
        now = read_node(self._root, self._gpus, self._storage)
        for change in changes(self._node, now) if self._node is not None else ():
            self._note_change(change)
        self._node = now
        for source, line in self._lines():
            self._note_line(source, line)

    def _find_logs(self, *, from_end: bool) -> None:
        """Opens files that the patterns name and that are new; what is in them before that is no news."""
        for pattern in self._logs:
            for name in glob.glob(pattern):
                if name not in self._followed:
                    self._followed[name] = Followed(pathlib.Path(name))
                    if from_end:
                        for _ in self._followed[name].new_lines():
                            pass

    def _lines(self) -> Iterator[tuple[str, str]]:
        for name, followed in self._followed.items():
            for line in followed.new_lines():
                yield name, line.decode(errors="backslashreplace")
        if self._kernel is not None:
            for line in self._kernel.new_lines():
                yield "kernel", line

    def _note_line(self, source: str, line: str) -> None:
        rule = classify(self._rules, line)
        if rule is not None:
            self._note(rule, source, line.strip())

    def _note_change(self, change: NodeChange) -> None:
        for _ in range(change.times):
            self._note(self._by_name[change.name], change.source, change.evidence)

    def _note(self, rule: LogRule, source: str, evidence: str) -> None:
        now = time.time()
        if self._rates.add(rule, now):
            sighting = Sighting(now, self._host, rule.name, rule.action, source, evidence)
            write_sighting(self._run_folder, sighting)
            if self._act is not None:
                self._act(sighting)


def _open_kernel_log(path: pathlib.Path, say: Callable[[str], None]) -> KernelLog | None:
    try:
        return KernelLog(path)
    except OSError as error:
        say(f"agent: {path}: {error.strerror}: what the kernel says is not watched; root may read it")
        return None
