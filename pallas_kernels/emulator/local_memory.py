"""Local memory (LDS) of all workgroups, with a check for races between waves.

Each byte remembers the last wave that wrote it, the waves that read it since, and the number of barriers
that its workgroup had passed when that access was complete. An access by another wave needs a barrier
between, and the earlier access must have been waited for before that barrier: `s_barrier` alone does not
wait for LDS.
"""

import dataclasses

import numpy as np

from pallas_kernels.emulator.errors import EmulationError

NOBODY, SEVERAL = -1, -2
IN_FLIGHT = np.iinfo(np.int32).max
"""Barrier number of an access that has not been waited for."""
FILL = 0xA5
LARGEST_ACCESS = 16


@dataclasses.dataclass(frozen=True)
class Touched:
    """Bytes of an access by active lanes, for the moment when it is complete.

    Attributes:
      positions: position of each lane's wave among the waves of the access, [active].
      rows: workgroup of each lane, [active, 1].
      owners: number of each lane's wave within its workgroup, [active, 1].
      bytes: addresses of the accessed bytes, [active, size].
      is_write: whether it writes.
    """

    positions: np.ndarray
    rows: np.ndarray
    owners: np.ndarray
    bytes: np.ndarray
    is_write: bool


class LocalMemory:
    """Local memory of all workgroups.

    Attributes:
      size: bytes of each workgroup.
      barriers: barriers that each workgroup has passed, [groups].
    """

    def __init__(self, num_groups: int, size: int, *, check: bool):
        self.size = size
        self.barriers = np.zeros(num_groups, np.int32)
        self._check = check
        # Space after the end: a wide access is indexed before it is checked.
        shape = num_groups, size + LARGEST_ACCESS
        self._bytes = np.full(shape, FILL, np.uint8)
        tracked = shape if check else (0, 0)
        self._writer = np.full(tracked, NOBODY, np.int16)
        self._write_barrier = np.full(tracked, -1, np.int32)
        self._reader = np.full(tracked, NOBODY, np.int16)
        self._read_barrier = np.full(tracked, -1, np.int32)

    def load(
        self, addresses: np.ndarray, lanes: np.ndarray, size: int, groups: np.ndarray, waves: np.ndarray
    ) -> tuple[list[np.ndarray], Touched]:
        """Reads from local memory.

        Args:
          addresses: byte addresses, [n, 64], int64.
          lanes: active lanes, [n, 64].
          size: bytes of each lane's access.
          groups: workgroup of each wave, [n].
          waves: number of each wave within its workgroup, [n].

        Returns:
          Values as of `GlobalMemory.load`, and the bytes to pass to `complete` when the access is complete.

        Raises:
          EmulationError: if an access leaves the workgroup's memory, is not aligned, or races.
        """
        touched = self._touch(addresses, lanes, size, groups, waves, is_write=False)
        if self._check and lanes.any():
            self._check_read(touched)
        # Every byte of every active lane is one index: local memory is small.
        raw = np.zeros((*lanes.shape, size), np.uint8)
        raw[lanes] = self._bytes[touched.rows, touched.bytes]
        if size >= 4:
            words = raw.view(np.uint32)
            return [words[..., word] for word in range(size // 4)], touched
        # Narrow reads are extended with zeros.
        weights = np.uint32(1) << np.arange(0, 8 * size, 8, dtype=np.uint32)
        return [(raw.astype(np.uint32) * weights).sum(axis=-1, dtype=np.uint32)], touched

    def store(
        self,
        addresses: np.ndarray,
        lanes: np.ndarray,
        values: list[np.ndarray],
        size: int,
        groups: np.ndarray,
        waves: np.ndarray,
    ) -> Touched:
        """Writes to local memory.

        Args:
          addresses: byte addresses, [n, 64], int64.
          lanes: active lanes, [n, 64].
          values: arrays [n, 64] of 32 bits, one for each four bytes.
          size: bytes of each lane's access.
          groups: workgroup of each wave, [n].
          waves: number of each wave within its workgroup, [n].

        Returns:
          The bytes to pass to `complete` when the access is complete.

        Raises:
          EmulationError: as `load`.
        """
        touched = self._touch(addresses, lanes, size, groups, waves, is_write=True)
        words = np.stack([np.broadcast_to(value, lanes.shape) for value in values], axis=-1)
        raw = np.ascontiguousarray(words).view(np.uint8)[..., :size]
        self._bytes[touched.rows, touched.bytes] = raw[lanes]
        if self._check and lanes.any():
            self._check_write(touched, raw[lanes])
        return touched

    def complete(self, touched: Touched, positions: np.ndarray) -> None:
        """Notes that an access of some waves has been waited for.

        Args:
          touched: bytes of the access.
          positions: which of its waves have waited.
        """
        if not self._check:
            return
        done = np.isin(touched.positions, positions)
        rows, owner, bytes_ = touched.rows[done], touched.owners[done], touched.bytes[done]
        # The access counts as complete before the next barrier.
        now = self.barriers[rows]
        if touched.is_write:
            writer = self._writer[rows, bytes_]
            mine = (writer == owner) | (writer == SEVERAL)
            old = self._write_barrier[rows, bytes_]
            self._write_barrier[rows, bytes_] = np.where(mine, now, old)
        else:
            # A later read of the same byte that is still in flight keeps it in flight for longer than is
            # so; it is complete at the later wait.
            old = self._read_barrier[rows, bytes_]
            self._read_barrier[rows, bytes_] = np.where(old == IN_FLIGHT, now, old)

    def _touch(
        self,
        addresses: np.ndarray,
        lanes: np.ndarray,
        size: int,
        groups: np.ndarray,
        waves: np.ndarray,
        *,
        is_write: bool,
    ) -> Touched:
        at = np.where(lanes, np.broadcast_to(addresses, lanes.shape), 0)
        if (at + size > self.size).any() and lanes.any():
            message = f"{size} bytes at {int(at.max())} of local memory are used, which has {self.size} bytes"
            raise EmulationError("local bounds", message)
        # Wide accesses need 8 bytes only: LLVM enables unaligned access on HSA (AMDGPUSubtarget.cpp).
        if (at % min(size, 8)).any():
            raise EmulationError(
                "alignment", f"{size} bytes of local memory are used at an unaligned address"
            )
        positions = np.nonzero(lanes)[0]
        rows, owners = groups[positions][:, None], waves[positions][:, None]
        return Touched(positions, rows, owners, at[lanes][:, None] + np.arange(size), is_write)

    def _check_write(self, touched: Touched, written: np.ndarray) -> None:
        rows, bytes_, owner = touched.rows, touched.bytes, touched.owners
        # Triton lets all waves that hold the same value store it, which is harmless.
        if (self._bytes[rows, bytes_] != written).any():
            raise _race(
                "writes to a byte another value than another wave or lane at the same time", np.zeros(1)
            )
        self._check_writer(rows, bytes_, owner, "writes over a byte that another wave has written")
        reader, barrier = self._reader[rows, bytes_], self._read_barrier[rows, bytes_]
        # An earlier read must have returned before a barrier that this wave has passed too.
        bad = (reader != NOBODY) & (reader != owner) & (barrier >= self.barriers[rows])
        if bad.any():
            raise _race("writes over a byte that another wave has read", barrier[bad])
        self._writer[rows, bytes_] = owner
        self._writer[rows, bytes_] = np.where(self._writer[rows, bytes_] == owner, owner, SEVERAL)
        self._write_barrier[rows, bytes_] = IN_FLIGHT
        # Later writers race with this write; they need not look at the reads before it.
        self._reader[rows, bytes_] = NOBODY

    def _check_read(self, touched: Touched) -> None:
        rows, bytes_, owner = touched.rows, touched.bytes, touched.owners
        if (self._writer[rows, bytes_] == NOBODY).any():
            raise EmulationError("local race", "a wave reads local memory that was never written")
        self._check_writer(rows, bytes_, owner, "reads a byte that another wave has written")
        reader, barrier = self._reader[rows, bytes_], self._read_barrier[rows, bytes_]
        # Readers before the last barrier no longer matter.
        alone = (reader == NOBODY) | (reader == owner) | (barrier < self.barriers[rows])
        self._reader[rows, bytes_] = np.where(alone, owner, SEVERAL)
        # Several waves of one instruction may read one byte: the last of them overwrote the others.
        self._reader[rows, bytes_] = np.where(
            self._reader[rows, bytes_] != owner, SEVERAL, self._reader[rows, bytes_]
        )
        self._read_barrier[rows, bytes_] = IN_FLIGHT

    def _check_writer(self, rows: np.ndarray, bytes_: np.ndarray, owner: np.ndarray, what: str) -> None:
        writer, barrier = self._writer[rows, bytes_], self._write_barrier[rows, bytes_]
        bad = (writer != NOBODY) & (writer != owner) & (barrier >= self.barriers[rows])
        if bad.any():
            raise _race(what, barrier[bad])


def _race(what: str, barriers: np.ndarray) -> EmulationError:
    # The reason names what is missing in the code.
    reason = "that access was not waited for before the barrier"
    if (barriers != IN_FLIGHT).any():
        reason = "there is no barrier between"
    return EmulationError("local race", f"a wave {what}: {reason}")
