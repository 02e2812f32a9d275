"""Engines that start the processes of a run: on this machine, or on the nodes of a SLURM job."""

import contextlib
import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from zaya_jax.aegis.agent.agent import Agent
from zaya_jax.aegis.agent.log_rules import load_rules
from zaya_jax.parallel.processes.launch import Children, Launch
from zaya_jax.parallel.processes.process_group import host_name
from zaya_jax.parallel.processes.slurm import find_job

_LEAVING_SECONDS = 5.0
Line = Callable[[str, str], None]
"""Function that receives the host of a process and a line of its standard error."""


@runtime_checkable
class RunEngine(Protocol):
    """Interface of all engines of a supervisor."""

    def nodes(self) -> list[str]:
        """Returns the nodes that respond, spare ones last."""
        ...

    def run(self, nodes: Sequence[str], on_line: Line) -> int:
        """Runs all processes until they exit, and returns the exit code of the first that failed."""
        ...

    def send_signal(self, number: int) -> None:
        """Sends a signal to all running processes."""
        ...

    def drain(self, node: str, reason: str) -> str | None:
        """Keeps all jobs from using a node; returns why this failed, or None."""
        ...

    def requeue(self) -> None:
        """Restarts the whole job in another allocation, if there is a queue."""
        ...

    def watching(self, nodes: Sequence[str], run_folder: str) -> contextlib.AbstractContextManager[None]:
        """Runs an agent on each node for the duration of the context."""
        ...


class LocalEngine:
    """Engine that runs processes on this machine.

    Args:
      program: program to run.
      rules: file of rules for the agent.
      num_nodes: number of virtual nodes, each of which runs one process, to rehearse what needs several
        nodes; None for this machine as the only node.
    """

    def __init__(self, program: Launch, rules: str, num_nodes: int | None = None):
        self._program, self._rules, self._children = program, rules, Children()
        self._num_nodes = num_nodes

    def nodes(self) -> list[str]:
        """Returns the name of this machine, or those of the virtual nodes."""
        if self._num_nodes is None:
            return [host_name(os.environ)]
        return [f"node{number}" for number in range(self._num_nodes)]

    def run(self, nodes: Sequence[str], on_line: Line) -> int:
        """Runs all processes until they exit."""
        names = [nodes[0]] * self._program.num_processes if self._num_nodes is None else nodes
        # Processes of this machine use its own name.
        hosts = () if self._num_nodes is None else nodes
        program = dataclasses.replace(self._program, hosts=hosts)
        return self._children.run(program, on_line=lambda number, line: on_line(names[number], line))

    def send_signal(self, number: int) -> None:
        """Sends a signal to all processes."""
        self._children.send(number)

    def drain(self, node: str, reason: str) -> str | None:
        """Returns that there is no other machine to use instead; virtual nodes need no draining."""
        del node, reason
        return "this machine is the only one" if self._num_nodes is None else None

    def requeue(self) -> None:
        """Does nothing: there is no queue."""

    @contextlib.contextmanager
    def watching(self, nodes: Sequence[str], run_folder: str) -> Iterator[None]:
        """Runs an agent in a thread of this process."""
        del nodes
        # A separate process would use more memory and time than the agent itself.
        agent = Agent(pathlib.Path(run_folder), load_rules(self._rules))
        thread = threading.Thread(target=agent.watch, name="agent", daemon=True)
        thread.start()
        try:
            yield
        finally:
            agent.stop()
            thread.join()


class SlurmEngine:
    """Engine that runs tasks of a SLURM job, from within its batch script.

    Args:
      command: command line of each task.
      rules: file of rules for the agents.

    Raises:
      UserError: outside of a SLURM job, or if SLURM's variables are malformed.
    """

    def __init__(self, command: Sequence[str], rules: str):
        self._command, self._rules = list(command), rules
        self._job = find_job(os.environ)
        self._is_running = threading.Event()

    def nodes(self) -> list[str]:
        """Returns the nodes of this allocation that respond, in its order."""
        return [node for node in self._job.hosts if not self._is_gone(node)]

    def _is_gone(self, node: str) -> bool:
        # A node that belongs to several partitions has a line for each of them, all with its one state.
        states = _command_output(["sinfo", "--noheader", f"--nodes={node}", "--format=%t"]).split()
        # A "*" marks nodes that do not respond.
        return not states or any(
            word in states[0] for word in ("down", "drain", "drng", "fail", "*", "maint", "reboot", "unk")
        )

    def run(self, nodes: Sequence[str], on_line: Line) -> int:
        """Runs a step of the job on some of its nodes."""
        step = subprocess.Popen(
            [
                *self._step(nodes, [self._job.tasks[self._job.hosts.index(node)] for node in nodes]),
                # Ends all tasks when one fails; otherwise the rest would wait in a collective.
                "--kill-on-bad-exit=1",
                # Seconds that the other tasks have after the first one has ended.
                "--wait=30",
                *self._command,
            ],
            stderr=subprocess.PIPE,
            text=True,
            # Libraries may write any bytes, which must not end the reading of the log.
            errors="backslashreplace",
            # In its own process group, so that signals of SLURM and Ctrl-C reach it only through us.
            process_group=0,
        )
        self._is_running.set()
        try:
            with step:
                assert step.stderr is not None
                for line in step.stderr:
                    on_line(_host_of(line, nodes), line)
            return _exit_code(step.returncode)
        finally:
            self._is_running.clear()

    def send_signal(self, number: int) -> None:
        """Sends a signal to all tasks."""
        # A signal to srun would give the tasks only KillWait seconds, too few to save a large state.
        if self._is_running.is_set():
            # scancel is given names of signals without SIG.
            subprocess.run(
                ["scancel", f"--signal={signal.Signals(number).name[3:]}", self._job.name], check=False
            )

    def drain(self, node: str, reason: str) -> str | None:
        """Drains a node in SLURM, which needs the privileges of an operator."""
        # A job may drain its own nodes only.
        if node not in self._job.hosts:
            return f"{node} is not a node of this job"
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
        """Puts the job back into the queue; SLURM then ends this process."""
        subprocess.run(["scontrol", "requeue", self._job.name], check=False)

    @contextlib.contextmanager
    def watching(self, nodes: Sequence[str], run_folder: str) -> Iterator[None]:
        """Runs an agent on each node, in a separate step, whose failure does not end the training step."""
        # Agents write into the run folder before the run itself creates it.
        pathlib.Path(run_folder).mkdir(parents=True, exist_ok=True)
        words = [
            *self._step(nodes, [1] * len(nodes)),
            sys.executable,
            "-m",
            "zaya_jax.cli",
            "aegis",
            "agent",
            run_folder,
        ]
        step = subprocess.Popen([*words, f"--rules={self._rules}"], process_group=0)
        try:
            yield
        finally:
            step.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.wait(_LEAVING_SECONDS)
            step.kill()
            step.wait()

    def _step(self, nodes: Sequence[str], tasks: Sequence[int]) -> list[str]:
        """Returns the beginning of the command line of a step.

        Args:
          nodes: nodes of the step.
          tasks: number of tasks on each node.
        """
        words = ["srun", f"--nodes={len(nodes)}", f"--ntasks={sum(tasks)}"]
        if len(set(tasks)) == 1:
            words += [f"--ntasks-per-node={tasks[0]}", f"--nodelist={','.join(nodes)}"]
        else:
            # Each node is listed once per task. Otherwise srun assigns tasks by the number of CPUs.
            repeated = ",".join(node for node, count in zip(nodes, tasks, strict=True) for _ in range(count))
            words += ["--distribution=arbitrary", f"--nodelist={repeated}"]
        # A previous step on a node that has failed may still hold its GPUs: share them.
        return [*words, "--overlap"]


def _command_output(command: Sequence[str]) -> str:
    """Returns the output of a SLURM command; "" if it fails, as during a failover of slurmctld."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout if done.returncode == 0 else ""


def _host_of(line: str, nodes: Sequence[str]) -> str:
    """Returns the node that a line names, as SLURM's messages do; else the first node, of process 0."""
    # Only near the beginning, as in "srun: error: node7: task 3: Killed": further on a line may quote any
    # node.
    return next((node for node in nodes if f"{node}:" in line.split(" ", 4)[:4]), nodes[0])


def _exit_code(code: int) -> int:
    # A negative code is the signal that ended srun; shells report it as 128 plus its number.
    return 128 - code if code < 0 else code
