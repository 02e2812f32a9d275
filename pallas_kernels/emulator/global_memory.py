"""Device memory of a launch: buffers between guards, and what each byte may be used for.

Every access is checked against the exact size of its buffer. Bytes remember which workgroup wrote or read
them: workgroups run in any order on a GPU, so that one must not read or overwrite what another one writes.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from pallas_kernels.emulator.errors import EmulationError

BASE = 0x7F12_0000_0000
"""Device address of the first byte."""
GUARD = 4096
"""Bytes between buffers, which may not be accessed."""
ALIGNMENT = 256
KERNARG_PIECE = 64
"""The compiler reads the segment of arguments in pieces of up to this size, beyond its last argument."""
READABLE, WRITABLE, WRITTEN = 1, 2, 4
NOBODY, SEVERAL, ATOMICS = -1, -2, -3


@dataclasses.dataclass(frozen=True)
class Buffer:
    """An argument of a kernel.

    Attributes:
      array: contents; a writable buffer starts with them.
      writable: whether the kernel may write to it.
      initialized: whether the contents of a writable buffer count as written, as those of an operand that a
        kernel updates in place do.
    """

    array: np.ndarray
    writable: bool = False
    initialized: bool = False

    @property
    def rights(self) -> int:
        """Initial access rights of each byte, as a sum of flags such as `READABLE`."""
        written = WRITTEN if self.initialized or not self.writable else 0
        return READABLE | written | (WRITABLE if self.writable else 0)


class GlobalMemory:
    """Memory of a launch. Of arguments that are the same object, all point to one buffer.

    Attributes:
      addresses: device address of each argument.
      kernarg: device address of the segment of arguments.
    """

    def __init__(self, buffers: Sequence[Buffer], kernarg_bytes: int, *, check: bool):
        # By identity: equal contents do not make two buffers one.
        distinct = {id(buffer): buffer for buffer in buffers}
        self._buffers = list(distinct.values())
        starts, at = [], GUARD
        for size in [*(buffer.array.nbytes for buffer in self._buffers), kernarg_bytes]:
            starts.append(at)
            at += -(-size // ALIGNMENT) * ALIGNMENT + GUARD
        self._starts, kernarg = starts[:-1], starts[-1]
        # A pattern that is neither 0 nor a usual number shows reads of what no buffer covers.
        self._bytes = np.full(-(-at // ALIGNMENT) * ALIGNMENT, 0x5A, np.uint8)
        # One array seen as elements of each size that an access may have.
        self._views = {size: self._bytes.view(f"u{size}") for size in (1, 2, 4)}
        self._rights = np.zeros(len(self._bytes), np.uint8)
        self._check = check
        # Owners take eight bytes for each byte of memory: only where they are checked.
        size = len(self._bytes) if check else 0
        self._writer = np.full(size, NOBODY, np.int32)
        self._reader = np.full(size, NOBODY, np.int32)
        start_of = dict(zip(distinct, self._starts, strict=True))
        self.addresses = [BASE + start_of[id(buffer)] for buffer in buffers]
        self.kernarg = BASE + kernarg
        for start, buffer in zip(self._starts, self._buffers, strict=True):
            self._place(start, buffer.array, buffer.rights)
        pointers = np.array(self.addresses, np.uint64)
        # XLA passes pointers only; their number and the size of the segment must agree.
        if pointers.nbytes > max(kernarg_bytes, 8) and buffers:
            raise ValueError(f"{len(buffers)} buffers do not fit {kernarg_bytes} bytes of arguments")
        self._place(kernarg, pointers, READABLE | WRITTEN)
        whole = -(-max(kernarg_bytes, 1) // KERNARG_PIECE) * KERNARG_PIECE
        self._rights[kernarg : kernarg + whole] = READABLE | WRITTEN

    def _place(self, start: int, array: np.ndarray, rights: int) -> None:
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._bytes[start : start + len(raw)] = raw
        self._rights[start : start + len(raw)] = rights

    def outputs(self) -> list[np.ndarray]:
        """Contents of the writable buffers."""
        results = []
        for start, buffer in zip(self._starts, self._buffers, strict=True):
            if buffer.writable:
                raw = self._bytes[start : start + buffer.array.nbytes].copy()
                results.append(raw.view(buffer.array.dtype).reshape(buffer.array.shape))
        return results

    def unwritten(self) -> list[int]:
        """Bytes of each writable buffer that no workgroup has written."""
        return [
            int((self._rights[start : start + buffer.array.nbytes] & WRITTEN == 0).sum())
            for start, buffer in zip(self._starts, self._buffers, strict=True)
            if buffer.writable
        ]

    def load(
        self, addresses: np.ndarray, lanes: np.ndarray, size: int, groups: np.ndarray
    ) -> list[np.ndarray]:
        """Reads from the addresses of active lanes.

        Args:
          addresses: device addresses, [n, lanes], int64.
          lanes: active lanes, [n, lanes].
          size: bytes of each lane's access.
          groups: workgroup of each wave, [n].

        Returns:
          Values of 32 bits, one array [n, lanes] for each four bytes; narrower ones are extended with
          zeros.

        Raises:
          EmulationError: if an access leaves the buffers, is not aligned, reads what was never written, or
          what
            another workgroup wrote.
        """
        # Inactive lanes may hold any address: they read a byte that exists.
        at = np.where(lanes, addresses - BASE, GUARD)
        self._check_access(at[lanes], size, READABLE, "read")
        if self._check and lanes.any():
            self._note_reads(at[lanes], size, np.broadcast_to(groups[:, None], lanes.shape)[lanes])
        if size < 4:
            return [self._views[size][at // size].astype(np.uint32)]
        return [self._views[4][(at >> 2) + word] for word in range(size // 4)]

    def store(
        self,
        addresses: np.ndarray,
        lanes: np.ndarray,
        values: Sequence[np.ndarray],
        size: int,
        groups: np.ndarray,
    ) -> None:
        """Writes to the addresses of active lanes; arguments and errors as of `load`.

        Args:
          addresses: device addresses, [n, lanes], int64.
          lanes: active lanes, [n, lanes].
          values: one array [n, lanes] for each four bytes; of narrower accesses the lowest bytes are
          written. size: bytes of each lane's access. groups: workgroup of each wave, [n].
        """
        at = (np.where(lanes, addresses - BASE, GUARD))[lanes]
        if not len(at):
            return
        self._check_access(at, size, WRITABLE, "written")
        if self._check:
            self._note_writes(at, size, np.broadcast_to(groups[:, None], lanes.shape)[lanes])
        # Wide accesses are made of words, which is also what the hardware guarantees to be whole.
        step = min(size, 4)
        for offset in range(size):
            self._rights[at + offset] |= WRITTEN
        for word, value in enumerate(values):
            self._views[step][(at + step * word) // step] = np.broadcast_to(value, lanes.shape)[lanes]

    def add_floats(self, addresses: np.ndarray, lanes: np.ndarray, values: np.ndarray) -> None:
        """Adds float32 numbers to memory atomically; arguments as of `store`, values as bits."""
        at = (np.where(lanes, addresses - BASE, GUARD))[lanes]
        if not len(at):
            return
        self._check_access(at, 4, WRITABLE, "written")
        self._check_access(at, 4, READABLE, "read")
        if self._check:
            # Atomics of all workgroups may meet, but nothing orders them with other accesses.
            for offset in range(0, 4, 2):
                place = at + offset
                is_written = (self._writer[place] != NOBODY) & (self._writer[place] != ATOMICS)
                if (is_written | (self._reader[place] != NOBODY)).any():
                    raise EmulationError("workgroup race", "an atomic meets another kind of access")
                self._writer[place] = ATOMICS
        numbers = self._views[4].view(np.float32)
        # Unlike an indexed sum, this one adds every lane where several name one address.
        np.add.at(numbers, at >> 2, np.broadcast_to(values, lanes.shape)[lanes].view(np.float32))

    def _check_access(self, at: np.ndarray, size: int, need: int, verb: str) -> None:
        if not len(at):
            return
        # Beyond all memory there is nothing to index, whether checks are on or not.
        low, high = int(at.min()), int(at.max()) + size
        if low < 0 or high > len(self._bytes):
            where = BASE + (low if low < 0 else high - size)
            raise EmulationError("bounds", f"address {where:#x} is {verb}, which belongs to no buffer")
        if (at % min(size, 4)).any():
            raise EmulationError("alignment", f"{size} bytes are {verb} at an address that is not aligned")
        if self._check:
            # Buffers and accesses are aligned to two bytes or are made of single bytes: every second byte
            # tells the whole access.
            for offset in range(0, size, min(size, 2)):
                self._check_rights(at + offset, need, verb)

    def _check_rights(self, at: np.ndarray, need: int, verb: str) -> None:
        rights = self._rights[at]
        if (rights & need != need).any():
            bad = int(at[rights & need != need][0])
            check = "read-only" if self._rights[bad] & READABLE else "bounds"
            raise EmulationError(check, f"{self._describe(bad)} is {verb}")
        if need == READABLE and (rights & WRITTEN == 0).any():
            bad = int(at[rights & WRITTEN == 0][0])
            raise EmulationError(
                "uninitialized memory", f"{self._describe(bad)} is read but was never written"
            )

    def _describe(self, at: int) -> str:
        """Names a byte by the last buffer that starts before it."""
        # The byte may belong to the guard after that buffer; the message gives the distance from its start.
        number = int(np.searchsorted(self._starts, at, side="right")) - 1
        if number < 0:
            return f"address {BASE + at:#x}, before the first buffer,"
        size = self._buffers[number].array.nbytes
        return f"byte {at - self._starts[number]} of buffer {number}, which has {size} bytes,"

    def _note_reads(self, at: np.ndarray, size: int, groups: np.ndarray) -> None:
        for offset in range(0, size, min(size, 2)):
            place = at + offset
            writer = self._writer[place]
            # Without atomics, nothing orders workgroups.
            if ((writer != NOBODY) & (writer != groups)).any():
                raise EmulationError("workgroup race", "a workgroup reads what another one has written")
            # Only bytes that somebody may write can be raced for.
            shared = self._rights[place] & WRITABLE != 0
            place, reader = place[shared], groups[shared]
            old = self._reader[place]
            self._reader[place] = np.where((old == NOBODY) | (old == reader), reader, SEVERAL)

    def _note_writes(self, at: np.ndarray, size: int, groups: np.ndarray) -> None:
        for offset in range(0, size, min(size, 2)):
            place = at + offset
            writer, reader = self._writer[place], self._reader[place]
            if ((writer != NOBODY) & (writer != groups)).any():
                raise EmulationError("workgroup race", "two workgroups write to one address")
            if ((reader != NOBODY) & (reader != groups)).any():
                raise EmulationError("workgroup race", "a workgroup writes what another one has read")
            self._writer[place] = groups
            # Within one instruction, two workgroups may name one address.
            if (self._writer[place] != groups).any():
                raise EmulationError("workgroup race", "two workgroups write to one address")
