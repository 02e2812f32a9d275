"""The identity of this process within a run: from flags, from variables that a launcher sets, or from SLURM.

Reads only the environment, so that the identity is known before jax initializes its devices. Where that also
tells the hosts of all processes, a process can derive the address of its parent in the tree.
"""

import dataclasses
import itertools
import re
import socket
from collections.abc import Mapping

from zaya_jax.errors import UserError
from zaya_jax.parallel.processes.listeners import host_and_port, is_local
from zaya_jax.parallel.processes.slurm import expand_counts, expand_hosts

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
"""Variable with the HOST:PORT at which process 0 listens; jax reads it too."""
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
JOB_INDEX = "JOB_COMPLETION_INDEX"
"""Variable that Kubernetes sets in the pods of an indexed job; a JobSet consists of such jobs."""
# Variables that srun sets for each task. In a batch script outside of srun some of them are missing.
_STEP_NODES, _STEP_TASKS = "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
_SLURM_STEP = ("SLURM_JOB_ID", _STEP_NODES, "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
# Matches the host name of pod 0 of an indexed job: Kubernetes appends the index to the name of the job.
_FIRST_POD = re.compile(r"([^.]*-)0(\..*)?")
# Variables that assign a node's devices to its tasks; if one is set, this module does not assign any.
_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS")
# Range of coordinator ports for SLURM jobs; no service is registered for them.
_FIRST_PORT, _NUM_PORTS = 61440, 4096


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that train together, and the number of this one.

    Attributes:
      coordinator: HOST:PORT of process 0.
      num_processes: number of processes.
      process: number of this process, counted from 0.
      local_device: index of the only device of the node that this process uses; None for all visible devices.
      hosts: host names of all processes, by process number, derived from the environment; empty if they are
        unknown. They need not be right: `rendezvous` uses them only as a shortcut.
    """

    coordinator: str
    num_processes: int
    process: int
    local_device: int | None = None
    hosts: tuple[str, ...] = dataclasses.field(default=(), repr=False)


def find_process_group(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
) -> ProcessGroup | None:
    """Finds the processes of this run. Flags override variables, and variables override SLURM.

    Args:
      environment: `os.environ`.
      coordinator: HOST:PORT from a flag; None if the flag is not set.
      num_processes: number of processes from a flag; None if the flag is not set.
      process: number of this process from a flag; None if the flag is not set.

    Returns:
      The processes; None for a run of one process.

    Raises:
      UserError: if some of the three values are known and others are not, or if they are invalid.
    """
    coordinator = coordinator or environment.get(COORDINATOR)
    num_processes = _number(environment, NUM_PROCESSES) if num_processes is None else num_processes
    # The process number alone means nothing: an indexed job without a coordinator has independent pods.
    if coordinator is None and num_processes is None and process is None:
        return _of_slurm(environment)
    process = _number(environment, PROCESS) if process is None else process
    is_pod = process is None and JOB_INDEX in environment
    process = _number(environment, JOB_INDEX) if is_pod else process
    if coordinator is None or num_processes is None or process is None:
        known = {COORDINATOR: coordinator, NUM_PROCESSES: num_processes, PROCESS: process}
        missing = [name for name, value in known.items() if value is None]
        raise UserError(
            f"a run of several processes needs {', '.join(known)}; {' and '.join(missing)} must be set too"
        )
    group = _checked(ProcessGroup(coordinator, num_processes, process))
    return dataclasses.replace(group, hosts=_hosts_by_name(group, is_pod=is_pod))


def _hosts_by_name(group: ProcessGroup, *, is_pod: bool) -> tuple[str, ...]:
    """Returns the hosts of all processes, if the name of process 0's host tells them.

    Args:
      group: processes of the run.
      is_pod: whether Kubernetes numbered the processes, as the pods of an indexed job.
    """
    host, _ = host_and_port(group.coordinator)
    if is_local(group.coordinator):
        return (host,) * group.num_processes
    match = _FIRST_POD.fullmatch(host) if is_pod else None
    if match is None:
        return ()
    return tuple(f"{match[1]}{number}{match[2] or ''}" for number in range(group.num_processes))


def _of_slurm(environment: Mapping[str, str]) -> ProcessGroup | None:
    if not all(name in environment for name in _SLURM_STEP):
        return None
    count = _number(environment, "SLURM_NTASKS") or 1
    if count == 1:
        return None
    # The port depends on the job, so that jobs on the same host use different ports.
    port = _FIRST_PORT + (_number(environment, "SLURM_JOB_ID") or 0) % _NUM_PORTS
    coordinator = f"{first_host(environment[_STEP_NODES])}:{port}"
    process = _number(environment, "SLURM_PROCID") or 0
    device, hosts = _slurm_device(environment), _slurm_hosts(environment, count)
    return _checked(ProcessGroup(coordinator, count, process, device, hosts))


def _slurm_hosts(environment: Mapping[str, str], num_processes: int) -> tuple[str, ...]:
    """Returns the hosts of all tasks of the step; none where consecutive tasks may be on different nodes.

    SLURM's default is a block of tasks per node, or one task per node. Its variables describe only the
    placement of this task, which must agree.
    """
    hosts = expand_hosts(environment[_STEP_NODES], name=_STEP_NODES)
    counts = expand_counts(environment.get(_STEP_TASKS, "1"), name=_STEP_TASKS)
    distribution = environment.get("SLURM_DISTRIBUTION", "block")
    is_block = distribution.startswith("block") or (distribution.startswith("cyclic") and max(counts) == 1)
    if not is_block or len(hosts) != len(counts) or sum(counts) != num_processes:
        return ()
    node = _number(environment, "SLURM_NODEID")
    if node is None or not 0 <= node < len(hosts):
        return ()
    derived = sum(counts[:node]) + (_number(environment, "SLURM_LOCALID") or 0)
    is_here = environment.get("SLURMD_NODENAME", hosts[node]) == hosts[node]
    if not is_here or derived != _number(environment, "SLURM_PROCID"):
        return ()
    return tuple(itertools.chain.from_iterable(map(itertools.repeat, hosts, counts)))


def _slurm_device(environment: Mapping[str, str]) -> int | None:
    """Returns the index of the device that a task uses; None if it uses all devices of its node.

    If any node has several tasks, each task of the step uses one device: all processes of a run must have the
    same number of devices.
    """
    per_node = environment.get(_STEP_TASKS, "1")
    is_alone = max(expand_counts(per_node, name=_STEP_TASKS)) == 1
    if is_alone or any(name in environment for name in _VISIBLE):
        return None
    return _number(environment, "SLURM_LOCALID")


def first_host(nodes: str) -> str:
    """Returns the first host of SLURM's list: of "rack[1-2]n[01-04],login" it is "rack1n01".

    Raises:
      UserError: for a list that is malformed or empty.
    """
    return expand_hosts(nodes, name=_STEP_NODES)[0]


def host_name(environment: Mapping[str, str]) -> str:
    """Returns the scheduler's name of this host, by which it can be drained; else the operating system's."""
    return environment.get("SLURMD_NODENAME") or environment.get("NODE_NAME") or socket.gethostname()


def _number(environment: Mapping[str, str], name: str) -> int | None:
    if name not in environment:
        return None
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f'{name} is "{environment[name]}"; it must be a whole number') from None


def _checked(group: ProcessGroup) -> ProcessGroup:
    if not 0 <= group.process < group.num_processes:
        raise UserError(
            f"this is process {group.process} of {group.num_processes}; numbers start at 0 and end at "
            f"{group.num_processes - 1}"
        )
    host, _, port = group.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise UserError(f'the coordinator is "{group.coordinator}"; it must be HOST:PORT')
    return group
