"""What a launch has executed: instructions, memory transactions, conflicts in local memory, idle lanes.

Device memory is counted in cache lines of 128 bytes that each instruction of a wave touches. Local memory
has 32 banks of four bytes and serves 128 bytes of lanes at once; lanes that want different words of one
bank wait for each other (CDNA3 ISA, "Local data share"). Which lanes are served together is in no ISA
document. [CK-LDS] gives the groups for reads and writes of 16 bytes; measurements on MI300 that others
published agree, and show groups in the order of the lanes for reads of 8 bytes. The order for narrower
accesses and for writes of 8 bytes is assumed to be that of the lanes too.
"""

import collections
import dataclasses

import numpy as np

from pallas_kernels.emulator.instruction import GpuInstruction

LINE_BYTES = 128
BANKS = 32
WORD = 4
_HALF = [0, 1, 2, 3, 20, 21, 22, 23, 4, 5, 6, 7, 16, 17, 18, 19]
READ_16_LANES = np.array([lane + first for first in (0, 8, 32, 40) for lane in _HALF])
"""Lanes of a read of 16 bytes in the order in which local memory serves them, eight at once ([CK-LDS])."""

CLASSES = {
    "v_mfma": "matrix",
    "v_": "vector",
    "s_load": "scalar memory",
    "s_": "scalar",
    "ds_": "local memory",
}
"""Class of an instruction by the start of its name; others access device memory."""


@dataclasses.dataclass
class Counts:
    """Counts of a launch, over all waves.

    Attributes:
      memory: whether accesses of memory are counted too, which takes time.
      instructions: executed instructions by mnemonic.
      lanes: lane operations of instructions that have lanes.
      active_lanes: those whose lane was active.
      device_bytes: bytes that lanes asked of device memory.
      device_lines: cache lines that instructions touched.
      local_cycles: cycles of local memory.
      local_conflicts: those beyond the minimum.
    """

    memory: bool = False
    instructions: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    lanes: int = 0
    active_lanes: int = 0
    device_bytes: int = 0
    device_lines: int = 0
    local_cycles: int = 0
    local_conflicts: int = 0

    def __add__(self, other: "Counts") -> "Counts":
        names = [field.name for field in dataclasses.fields(self) if field.name != "memory"]
        return Counts(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @property
    def minimum_lines(self) -> int:
        """Cache lines that the bytes of device memory fill."""
        return -(-self.device_bytes // LINE_BYTES)

    @property
    def active_share(self) -> float:
        """Share of active lanes in instructions that have lanes; the rest is divergence."""
        return self.active_lanes / max(self.lanes, 1)

    def by_class(self) -> collections.Counter[str]:
        """Executed instructions by class, such as matrix or device memory (`CLASSES`)."""
        result: collections.Counter[str] = collections.Counter()
        for name, count in self.instructions.items():
            result[class_of(name)] += count
        return result

    def count_instruction(self, instruction: GpuInstruction, exec_lanes: np.ndarray) -> None:
        """Counts an instruction of the waves whose lanes are given, [n, 64]."""
        self.instructions[instruction.name] += len(exec_lanes)
        # Scalar instructions have no lanes.
        if not instruction.name.startswith("s_"):
            self.lanes += exec_lanes.size
            self.active_lanes += int(np.count_nonzero(exec_lanes))

    def count_device_access(self, addresses: np.ndarray, lanes: np.ndarray, size: int) -> None:
        """Counts an access of device memory, addresses and lanes [n, 64], size in bytes."""
        if not self.memory:
            return
        self.device_bytes += int(np.count_nonzero(lanes)) * size
        # An aligned access touches one line; others the lines of their first and last byte.
        ends = np.concatenate([addresses, addresses + size - 1], axis=1) // LINE_BYTES
        self.device_lines += _distinct(ends, np.concatenate([lanes, lanes], axis=1))

    def count_local_access(
        self, addresses: np.ndarray, lanes: np.ndarray, size: int, *, is_read: bool
    ) -> None:
        """Counts an access of local memory, addresses and lanes [n, 64], size in bytes."""
        if not self.memory:
            return
        if is_read and size == 16:
            addresses, lanes = addresses[:, READ_16_LANES], lanes[:, READ_16_LANES]
        words = max(size // WORD, 1)
        # The hardware takes as many lanes at once as fill the banks.
        together = BANKS // words
        word = addresses[..., None] // WORD + np.arange(words)  # [n, 64, words]
        shape = lanes.size // together, together * words
        cycles = _bank_cycles(word.reshape(shape), np.repeat(lanes, words, axis=1).reshape(shape))
        self.local_cycles += int(cycles.sum())
        self.local_conflicts += int(np.maximum(cycles - 1, 0).sum())


def class_of(name: str) -> str:
    """Returns the class of an instruction."""
    for prefix, kind in CLASSES.items():
        if name.startswith(prefix):
            return kind
    return "device memory"


def _bank_cycles(words: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Cycles for which each group of lanes occupies the banks; lanes with the same word share it.

    Args:
      words: numbers of the words that a group accesses, [groups, words].
      used: whether the lane of each word is active, of the same shape.
    """
    ordered = np.sort(np.where(used, words, -1), axis=1)
    is_new = (np.diff(ordered, axis=1, prepend=-1) != 0) & (ordered >= 0)
    # The fullest bank decides how long the group takes.
    counts = np.zeros((len(words), BANKS), np.int64)
    rows = np.broadcast_to(np.arange(len(words))[:, None], words.shape)
    np.add.at(counts, (rows[is_new], ordered[is_new] % BANKS), 1)
    return counts.max(axis=1)


def _distinct(values: np.ndarray, valid: np.ndarray) -> int:
    """Number of distinct valid values in each row, summed over rows."""
    # Sorted, equal values are neighbors; -1 marks lanes that do not count.
    ordered = np.sort(np.where(valid, values, -1), axis=1)
    changes = np.diff(ordered, axis=1, prepend=-1) != 0
    return int((changes & (ordered >= 0)).sum())
