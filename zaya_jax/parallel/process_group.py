"""Which process of a run this is: from flags, from variables that a launcher sets, or from SLURM.

Reads the environment and nothing else, so that a process knows it before jax wakes a device.
"""

import dataclasses
import re
import socket
from collections.abc import Mapping

COORDINATOR = "JAX_COORDINATOR_ADDRESS"
"""HOST:PORT at which process 0 listens; jax reads it too."""
NUM_PROCESSES = "JAX_NUM_PROCESSES"
PROCESS = "JAX_PROCESS_ID"
JOB_INDEX = "JOB_COMPLETION_INDEX"
"""Kubernetes sets it in the pods of an indexed job, of which a JobSet is made."""
_SLURM_STEP = ("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID")
"""What srun sets for each task. In a batch script, before srun, some of them are missing."""
_VISIBLE = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "JAX_LOCAL_DEVICE_IDS")
"""Set, they have dealt a node's devices to its tasks already."""
_FIRST_PORT, _NUM_PORTS = 61440, 4096
"""Of SLURM's jobs: ports that no service is registered for."""


@dataclasses.dataclass(frozen=True)
class ProcessGroup:
    """The processes that are to train together, and this one among them.

    Attributes:
      coordinator: HOST:PORT of process 0.
      num_processes: how many there are.
      process: this one's number, from 0.
      local_device: the only one of its node's devices that it is to take; None for all that it sees.
    """

    coordinator: str
    num_processes: int
    process: int
    local_device: int | None = None


def find_process_group(
    environment: Mapping[str, str],
    *,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process: int | None = None,
) -> ProcessGroup | None:
    """The processes of this run; flags go before variables, and these before SLURM.

    Args:
      environment: `os.environ`.
      coordinator: HOST:PORT, as a flag gave it; None where there was none, as for the next two.
      num_processes: how many there are.
      process: this one's number.

    Returns:
      None for a process that is alone.

    Raises:
      ValueError: if some of the three are known and others are not, or they cannot be.
    """
    coordinator = coordinator or environment.get(COORDINATOR)
    num_processes = _number(environment, NUM_PROCESSES) if num_processes is None else num_processes
    if coordinator is None and num_processes is None and process is None:
        return _of_slurm(environment)
    for name in (PROCESS, JOB_INDEX):
        process = _number(environment, name) if process is None else process
    if coordinator is None or num_processes is None or process is None:
        known = {COORDINATOR: coordinator, NUM_PROCESSES: num_processes, PROCESS: process}
        missing = [name for name, value in known.items() if value is None]
        raise ValueError(
            f"a run of several processes needs {', '.join(known)}; {' and '.join(missing)} must be set too"
        )
    return _checked(ProcessGroup(coordinator, num_processes, process))


def _of_slurm(environment: Mapping[str, str]) -> ProcessGroup | None:
    if not all(name in environment for name in _SLURM_STEP):
        return None
    count = _number(environment, "SLURM_NTASKS") or 1
    if count == 1:
        return None
    # Jobs that share a host must not share a port.
    port = _FIRST_PORT + (_number(environment, "SLURM_JOB_ID") or 0) % _NUM_PORTS
    coordinator = f"{first_host(environment['SLURM_STEP_NODELIST'])}:{port}"
    process = _number(environment, "SLURM_PROCID") or 0
    return _checked(ProcessGroup(coordinator, count, process, _slurm_device(environment)))


def _slurm_device(environment: Mapping[str, str]) -> int | None:
    """A task has its node's devices for itself, or shares them with others and takes its own."""
    per_node = environment.get("SLURM_STEP_TASKS_PER_NODE", "1")  # "8(x16)": eight on each of 16 nodes
    if per_node.partition("(")[0] == "1" or any(name in environment for name in _VISIBLE):
        return None
    return _number(environment, "SLURM_LOCALID")


def first_host(nodes: str) -> str:
    """The first of SLURM's list of nodes: of "amd[007-015,020],login" it is "amd007"."""
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodes)
    if match is None:
        raise ValueError(f'SLURM_STEP_NODELIST is "{nodes}"; it must name a node')
    return match[1] + (match[2] or "")


def host_name(environment: Mapping[str, str]) -> str:
    """What the scheduler calls this host, where one says so: by that name it can be drained."""
    return environment.get("SLURMD_NODENAME") or environment.get("NODE_NAME") or socket.gethostname()


def _number(environment: Mapping[str, str], name: str) -> int | None:
    if name not in environment:
        return None
    try:
        return int(environment[name])
    except ValueError:
        raise ValueError(f'{name} is "{environment[name]}"; it must be a whole number') from None


def _checked(group: ProcessGroup) -> ProcessGroup:
    if not 0 <= group.process < group.num_processes:
        raise ValueError(
            f"this is process {group.process} of {group.num_processes}; they count from 0 to one less"
        )
    host, _, port = group.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ValueError(f'the coordinator is "{group.coordinator}"; it must be HOST:PORT')
    return group
