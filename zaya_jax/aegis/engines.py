"""Where the processes of a run are begun, and what can be done about the nodes there."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from zaya_jax.aegis.agent import Agent
from zaya_jax.aegis.rules import load_rules
from zaya_jax.parallel.launch import Children, Launch
from zaya_jax.parallel.process_group import host_name

_LEAVING_SECONDS = 5.0
Line = Callable[[str, str], None]
"""Takes the host of a process, and a line that it complained with."""


@runtime_checkable
class RunEngine(Protocol):
    """What begins the processes of a run."""

    def nodes(self) -> list[str]:
        """The nodes that the run could have now: those that answer, spare ones last."""
        ...

    def run(self, nodes: Sequence[str], on_line: Line) -> int:
        """Runs all processes to their end; the exit code of the first that failed."""
        ...

    def tell(self, number: int) -> None:
        """Gives all processes a signal; nothing where none runs."""
        ...

    def drain(self, node: str, reason: str) -> str | None:
        """Has nobody use a node of this job again; why that could not be done, if it could not."""
        ...

    def requeue(self) -> None:
        """Has the whole job begin anew, in another allocation, where that is possible."""
        ...

    def watching(self, nodes: Sequence[str], run_folder: str) -> contextlib.AbstractContextManager[None]:
        """Has an agent on each node watch it meanwhile."""
        ...


class LocalEngine:
    """Processes of this machine.

    Args:
      given: what is to run.
      rules: the file that the agent goes by.
    """

    def __init__(self, given: Launch, rules: str):
        self._given, self._rules, self._children = given, rules, Children()

    def nodes(self) -> list[str]:
        """The only one: this machine."""
        return [host_name(os.environ)]

    def run(self, nodes: Sequence[str], on_line: Line) -> int:
        """Runs all processes to their end."""
        return self._children.run(self._given, on_line=lambda _, line: on_line(nodes[0], line))

    def tell(self, number: int) -> None:
        """Gives all processes a signal."""
        self._children.send(number)

    def drain(self, node: str, reason: str) -> str | None:
        """There is no other machine to go on with."""
        del node, reason
        return "this machine is the only one"

    def requeue(self) -> None:
        """Nobody would begin it anew."""

    @contextlib.contextmanager
    def watching(self, nodes: Sequence[str], run_folder: str) -> Iterator[None]:
        """An agent in a thread: a process more would cost more than it does."""
        del nodes
        agent = Agent(pathlib.Path(run_folder), load_rules(self._rules))
        thread = threading.Thread(target=agent.watch, name="agent", daemon=True)
        thread.start()
        try:
            yield
        finally:
            agent.stop()
            thread.join()


class SlurmEngine:
    """Tasks of a SLURM job, from within its batch script.

    Args:
      command: of each task.
      rules: the file that the agents go by.
    """

    def __init__(self, command: Sequence[str], rules: str):
        self._command, self._rules = list(command), rules
        self._job, self._allocation = os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"]
        # As `8(x17)` of SLURM_TASKS_PER_NODE says it, where no number was asked for a node.
        tasks = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
        self._tasks = int(tasks.split("(")[0])
        self._is_running = threading.Event()

    def nodes(self) -> list[str]:
        """Nodes of this allocation that answer, in its order."""
        named = _said(["scontrol", "show", "hostnames", self._allocation]).split()
        return [node for node in named if not self._is_gone(node)]

    def _is_gone(self, node: str) -> bool:
        states = _said(["sinfo", "--noheader", f"--nodes={node}", "--format=%t"]).split()
        # A star: it does not answer.
        return not states or any(
            word in states[0] for word in ("down", "drain", "drng", "fail", "*", "maint", "reboot", "unk")
        )

    def run(self, nodes: Sequence[str], on_line: Line) -> int:
        """Runs a step of the job."""
        step = subprocess.Popen(
            [
                *self._step(nodes, self._tasks),
                # All tasks end when one does: without it the others would wait in a collective.
                "--kill-on-bad-exit=1",
                "--wait=30",
                *self._command,
            ],
            stderr=subprocess.PIPE,
            text=True,
            errors="backslashreplace",
            # SLURM's own word and Ctrl-C reach it through us alone.
            process_group=0,
        )
        self._is_running.set()
        try:
            assert step.stderr is not None
            for line in step.stderr:
                on_line(_host_of(line, nodes), line)
            return _exit_code(step.wait())
        finally:
            self._is_running.clear()

    def tell(self, number: int) -> None:
        """Gives all tasks a signal.

        Not by a signal to srun, which would give them KillWait's seconds, too few to save a large state.
        """
        if self._is_running.is_set():
            subprocess.run(["scancel", f"--signal={signal.Signals(number).name[3:]}", self._job], check=False)

    def drain(self, node: str, reason: str) -> str | None:
        """Asks SLURM to give the node to nobody: for which one must be its operator."""
        named = _said(["scontrol", "show", "hostnames", self._allocation]).split()
        if node not in named:
            return f"{node} is no node of this job"
        done = subprocess.run(
            ["scontrol", "update", f"nodename={node}", "state=drain", f"reason=zaya: {reason[:200]}"],
            capture_output=True,
            text=True,
            check=False,
        )
        return (
            None
            if done.returncode == 0
            else (done.stderr.strip() or f"scontrol ended with {done.returncode}")
        )

    def requeue(self) -> None:
        """Puts the job back into the queue, behind which this process is ended."""
        subprocess.run(["scontrol", "requeue", self._job], check=False)

    @contextlib.contextmanager
    def watching(self, nodes: Sequence[str], run_folder: str) -> Iterator[None]:
        """A step of the job with an agent on each node: no other step ends when one of them does."""
        # Agents write into it, and begin sooner than a run does.
        pathlib.Path(run_folder).mkdir(parents=True, exist_ok=True)
        words = [*self._step(nodes, 1), sys.executable, "-m", "zaya_jax.cli", "aegis", "agent", run_folder]
        step = subprocess.Popen([*words, f"--rules={self._rules}"], process_group=0)
        try:
            yield
        finally:
            step.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(_LEAVING_SECONDS)
            step.kill()
            step.wait()

    def _step(self, nodes: Sequence[str], tasks: int) -> list[str]:
        """The words of a step with so many tasks on each node."""
        return [
            "srun",
            f"--nodes={len(nodes)}",
            f"--ntasks={tasks * len(nodes)}",
            f"--ntasks-per-node={tasks}",
            f"--nodelist={','.join(nodes)}",
            # Where a node of the step before has died, it holds its GPUs still: they are shared with it.
            "--overlap",
        ]


def _said(command: Sequence[str]) -> str:
    """What a command of SLURM's says; nothing where it fails, as it does while slurmctld changes servers."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def _host_of(line: str, nodes: Sequence[str]) -> str:
    """Whom a line names, as SLURM's own do; else the first node, whose process speaks for all."""
    return next((node for node in nodes if f"{node}:" in line.split(" ", 4)[:4]), nodes[0])


def _exit_code(code: int) -> int:
    return 128 - code if code < 0 else code
