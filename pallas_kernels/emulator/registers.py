"""The registers of all waves, and the waves that execute the present instruction.

Values are bits: uint32 arrays, viewed as other types where an instruction computes with them. Arrays have
an axis of waves, and vector registers one of 64 lanes.
"""

from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import EmulationError
from pallas_kernels.emulator.in_flight import InFlight
from pallas_kernels.emulator.instruction import EXEC, SCALAR_REGISTERS, Operand

LANES = 64
NEVER_WRITTEN = np.uint32(0x7FC0BAD0)
"""Content of a vector register before its first write: a NaN, which shows in results."""
NEVER_WRITTEN_SCALAR = np.uint32(0xBAD0BAD0)
LOW = np.uint64(0xFFFFFFFF)
BITS = np.uint64(1) << np.arange(LANES, dtype=np.uint64)
"""Bit of each lane in a mask."""
TYPES = {
    "u": np.dtype(np.uint32),
    "i": np.dtype(np.int32),
    "f": np.dtype(np.float32),
    "U": np.dtype(np.uint64),
    "I": np.dtype(np.int64),
    "d": np.dtype(np.float64),
}
"""Letters by which the tables of instructions name types."""


class Registers:
    """Registers of all waves of a launch.

    Attributes:
      vector: vector registers, accumulators from 256 on, [registers, waves, 64].
      scalar: scalar registers, [128, waves].
      scc: scalar condition code, [waves].
      waves: numbers of the waves that execute the present instruction, [n].
      exec: their active lanes, [n, 64].
      undefined: vector registers that were read before they were written.
    """

    def __init__(self, num_vectors: int, active: np.ndarray, *, check: bool):
        num_waves = len(active)
        # Registers come first, so that one register of all waves is one contiguous block.
        self.vector = np.full((num_vectors, num_waves, LANES), NEVER_WRITTEN, np.uint32)
        self.scalar = np.full((SCALAR_REGISTERS, num_waves), NEVER_WRITTEN_SCALAR, np.uint32)
        self.scc = np.zeros(num_waves, bool)
        self.in_flight = InFlight(num_vectors, SCALAR_REGISTERS, num_waves)
        self.undefined: set[int] = set()
        self._check = check
        self._written = np.zeros((num_vectors, num_waves), bool)
        # EXEC exists twice: as bits in scalar registers, and as a mask, which most instructions need.
        self._exec = active.copy()
        self.select(np.arange(num_waves))
        self.write_mask(Operand("scalar", EXEC, 2), self._exec)

    def select(self, waves: np.ndarray) -> None:
        """Chooses the waves that execute the following instructions."""
        self.waves = waves
        # Indexing with a slice makes views instead of copies, which is most of the speed.
        self._index = slice(None) if len(waves) == len(self.scc) else waves
        self._set_exec()

    def _set_exec(self) -> None:
        self.exec = self._exec[self._index]
        self.all_lanes = bool(self.exec.all())

    @property
    def count(self) -> int:
        """Number of waves that execute the present instruction."""
        return len(self.waves)

    def active_waves(self) -> np.ndarray:
        """Whether each wave of the launch executes the present instruction, [waves]."""
        result = np.zeros(len(self.scc), bool)
        result[self._index] = True
        return result

    # Scalar registers

    def scalar32(self, operand: Operand, part: int = 0) -> np.ndarray:
        """Reads 32 bits of a scalar operand, [n].

        Args:
          operand: scalar register or constant.
          part: number of the register within the operand.
        """
        if operand.kind == "constant":
            return np.full(self.count, operand.value >> 32 * part & 0xFFFFFFFF, np.uint32)
        if operand.kind != "scalar":
            raise EmulationError("instruction", "a vector register stands where a scalar one is needed")
        number = operand.register + part
        if self._check:
            self.in_flight.check_register("scalar", number, self._index, "read")
        return self.scalar[number, self._index]

    def scalar64(self, operand: Operand) -> np.ndarray:
        """Reads 64 bits of a scalar operand, [n]."""
        if operand.kind == "constant":
            return np.full(self.count, operand.value & 0xFFFFFFFFFFFFFFFF, np.uint64)
        low, high = self.scalar32(operand), self.scalar32(operand, 1)
        return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)

    def write_scalar32(self, operand: Operand, value: np.ndarray, part: int = 0) -> None:
        """Writes a scalar register, value [n]."""
        number = operand.register + part
        if self._check:
            self.in_flight.check_register("scalar", number, self._index, "written")
        self.scalar[number, self._index] = value
        # Both views of EXEC change together.
        if number in (EXEC, EXEC + 1):
            self._exec[self._index] = self.mask(Operand("scalar", EXEC, 2))
            self._set_exec()

    def write_scalar64(self, operand: Operand, value: np.ndarray) -> None:
        """Writes a pair of scalar registers, value [n]."""
        self.write_scalar32(operand, (value & LOW).astype(np.uint32))
        self.write_scalar32(operand, (value >> np.uint64(32)).astype(np.uint32), 1)

    def mask(self, operand: Operand) -> np.ndarray:
        """Reads a mask of lanes, [n, 64]."""
        return (self.scalar64(operand)[:, None] & BITS) != 0

    def write_mask(self, operand: Operand, mask: np.ndarray) -> None:
        """Writes a mask of lanes, [n, 64]; bits of inactive lanes become 0."""
        # Comparisons clear the bits of inactive lanes.
        full = np.broadcast_to(mask & self.exec, (self.count, LANES))
        self.write_scalar64(operand, (full * BITS).sum(axis=1, dtype=np.uint64))

    # Vector registers

    def vector32(self, number: int) -> np.ndarray:
        """Reads a vector register, [n, 64]."""
        if self._check:
            self.in_flight.check_register("vector", number, self._index, "read")
            # Not an error: compilers read registers whose value then does not matter.
            if not self._written[number, self._index].all():
                self.undefined.add(number)
        return self.vector[number, self._index]

    def read(self, operand: Operand, kind: str) -> np.ndarray:
        """Reads an operand of a vector instruction.

        Args:
          operand: vector or scalar register, or constant.
          kind: type as in `TYPES`.

        Returns:
          Its value with the signs applied, of a shape that broadcasts to [n, 64].
        """
        bits = self._wide_bits(operand) if TYPES[kind].itemsize == 8 else self._bits(operand)
        # Signs are changed in the bits, so that those of zeros and NaNs change too.
        if operand.absolute:
            bits = bits & ~_sign_of(bits)
        if operand.negate:
            bits = bits ^ _sign_of(bits)
        return bits.view(TYPES[kind])

    def lanes(self, operand: Operand, kind: str) -> np.ndarray:
        """Reads an operand as `read` does, with a value for each lane, [n, 64]."""
        return np.ascontiguousarray(np.broadcast_to(self.read(operand, kind), (self.count, LANES)))

    def _bits(self, operand: Operand) -> np.ndarray:
        if operand.kind == "vector":
            return self.vector32(operand.register)
        return self.scalar32(operand)[:, None]

    def _wide_bits(self, operand: Operand) -> np.ndarray:
        if operand.kind != "vector":
            return self.scalar64(operand)[:, None]
        low, high = self.vector32(operand.register), self.vector32(operand.register + 1)
        return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)

    def write(self, operand: Operand, value: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Writes a vector operand of 32 or 64 bits.

        Args:
          operand: vector register.
          value: any type, of a shape that broadcasts to [n, 64].
          lanes: lanes to write, [n, 64]; None for the active ones.
        """
        value = np.ascontiguousarray(value)
        if value.dtype.itemsize == 8:
            # The lower half is in the first register.
            bits = value.view(np.uint64)
            self.write32(operand.register, (bits & LOW).astype(np.uint32), lanes)
            self.write32(operand.register + 1, (bits >> np.uint64(32)).astype(np.uint32), lanes)
        else:
            self.write32(operand.register, value.view(np.uint32), lanes)

    def write32(self, number: int, bits: np.ndarray, lanes: np.ndarray | None = None) -> None:
        """Writes a vector register; arguments as of `write`."""
        if self._check:
            self.in_flight.check_register("vector", number, self._index, "written")
        # Copying all lanes is faster than choosing among old and new ones.
        if lanes is None and self.all_lanes:
            self.vector[number, self._index] = bits
        else:
            old = self.vector[number, self._index]
            self.vector[number, self._index] = np.where(self.exec if lanes is None else lanes, bits, old)
        self._written[number, self._index] = True

    # Loads

    def load_vector(
        self,
        counter: str,
        first: int,
        values: list[np.ndarray],
        lanes: np.ndarray,
        then: Callable[[np.ndarray], None] = lambda positions: None,
    ) -> None:
        """Fills vector registers when the wait for a counter is executed.

        Args:
          counter: "vm" or "lgkm".
          first: number of the first register.
          values: content of each register, [n, 64].
          lanes: lanes that are filled, [n, 64].
          then: function that is called as the access completes, with positions within the waves.
        """
        waves, lanes = self.waves, lanes.copy()

        def complete(positions: np.ndarray) -> None:
            for offset, value in enumerate(values):
                old = self.vector[first + offset, waves[positions]]
                new = np.where(lanes[positions], value[positions], old)
                self.vector[first + offset, waves[positions]] = new
            then(positions)

        registers = tuple(("vector", first + offset) for offset in range(len(values)))
        self.in_flight.issue(counter, waves, registers=registers, complete=complete)
        # A read before the wait is an error already; after it, the register has been written.
        self._written[first : first + len(values), self._index] = True

    def load_scalar(self, first: int, values: list[np.ndarray]) -> None:
        """Fills scalar registers when all scalar and local accesses have been waited for, values [n]."""
        waves = self.waves

        def complete(positions: np.ndarray) -> None:
            for offset, value in enumerate(values):
                self.scalar[first + offset, waves[positions]] = value[positions]

        registers = tuple(("scalar", first + offset) for offset in range(len(values)))
        self.in_flight.issue("lgkm", waves, registers=registers, in_order=False, complete=complete)


def _sign_of(bits: np.ndarray) -> np.ndarray:
    highest = 8 * bits.dtype.itemsize - 1
    return np.array(1 << highest, bits.dtype)
