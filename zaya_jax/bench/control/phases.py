"""What is measured of the control plane, and the work of one process in each phase."""

import dataclasses

from zaya_jax.config import TrainConfig
from zaya_jax.parallel.device_groups import num_groups

SHARED_PHASES = ("start", "service", "devices", "same", "stop", "commit")
START, SERVICE, DEVICES, SAME, STOP, COMMIT = SHARED_PHASES
"""start: until all processes are connected in the tree, and have met once. service: until jax's coordination
service has connected them. devices: until jax has initialized the device of each, of which process 0 collects
descriptions and sends all of them to all. same: comparison of the config of all. stop: from the request of
one process until all agree on the step. commit: after the files of a checkpoint are written, until it has its
name, without the merge of its indexes."""
MERGE = "merge"
"""Merge of the indexes that the processes have written, by process 0 before a commit."""
PHASES = (*SHARED_PHASES, MERGE)
FILES = 8
"""Files that a process writes for a checkpoint: the index, the shapes and two files of data of each item."""
ITEMS, ARRAYS = ("weights", "training"), 60
"""Items of a checkpoint, and arrays of an item of which a process writes a part; about as in a run without an
average."""
STEP = 1
WRITERS = TrainConfig().checkpoint_writers
"""About how many processes write a checkpoint, of more."""


@dataclasses.dataclass(frozen=True)
class PhaseCost:
    """Cost of one phase.

    Attributes:
      seconds: time until the last process was done.
      messages: messages that process 0 sent and received.
      num_bytes: bytes of these messages; 0 for the rendezvous.
      cpu_seconds: CPU time of process 0.
      service_cpu_seconds: CPU time of the process of jax's service, from its start; 0 in other phases.
    """

    seconds: float
    messages: int
    num_bytes: int
    cpu_seconds: float
    service_cpu_seconds: float = 0.0


def writing_processes(num_processes: int, writers: int = WRITERS) -> range:
    """Returns the numbers of the processes that write a checkpoint in a run with one device each."""
    # The first of each group, as in a real run.
    return range(0, num_processes, num_processes // num_groups(num_processes, writers))


def described_files(process: int) -> dict[str, dict[str, object]]:
    """Returns descriptions of the files of one process, as long as those of a checkpoint."""
    # Names and hashes of the lengths that Orbax and the manifest give them.
    return {
        f"training/ocdbt.process_{process}/d/{process:016x}{number:016x}": {
            "bytes": 1_234_567_890,
            "xxh3_128": f"{process:016x}{number:016x}",
        }
        for number in range(FILES)
    }
