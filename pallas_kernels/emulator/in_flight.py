"""Memory accesses that were issued and not waited for, as `s_waitcnt` sees them.

gfx942 has two counters for each wave: vmcnt for global memory, lgkmcnt for scalar and local memory. Vector
loads of one counter return in order; scalar loads do not, so that only a wait for zero is enough for them
(CDNA3 ISA, "Manually inserted wait states" and S_WAITCNT). Here a load's registers receive their values
when the wait for it is executed: a read before is an error, not an old value.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from pallas_kernels.emulator.errors import EmulationError

COUNTERS = ("vm", "lgkm")


@dataclasses.dataclass
class Access:
    """An access by several waves that executed the same instruction together.

    Attributes:
      counter: counter that it raises, "vm" or "lgkm".
      waves: numbers of the waves, [n].
      order: value of each wave's counter when it was issued, [n].
      waiting: whether each wave's access is still in flight, [n].
      in_order: whether it returns in the order of its counter.
      registers: registers that it fills, as (file, number).
      complete: receives the positions within `waves` of accesses that have returned.
    """

    counter: str
    waves: np.ndarray
    order: np.ndarray
    waiting: np.ndarray
    in_order: bool
    registers: tuple[tuple[str, int], ...]
    complete: Callable[[np.ndarray], None]


class InFlight:
    """All accesses in flight, and the registers that they will fill.

    Attributes:
      pending: for the register files "vector" and "scalar", how many loads will fill a register of a wave,
        [registers, waves].
    """

    def __init__(self, num_vectors: int, num_scalars: int, num_waves: int):
        self.pending = {
            "vector": np.zeros((num_vectors, num_waves), np.int16),
            "scalar": np.zeros((num_scalars, num_waves), np.int16),
        }
        # A wave's counter never falls here: waiting compares the numbers of accesses instead.
        self._issued = {counter: np.zeros(num_waves, np.int64) for counter in COUNTERS}
        self._accesses: list[Access] = []

    def __bool__(self) -> bool:
        return bool(self._accesses)

    def issue(
        self,
        counter: str,
        waves: np.ndarray,
        *,
        registers: tuple[tuple[str, int], ...] = (),
        in_order: bool = True,
        complete: Callable[[np.ndarray], None],
    ) -> None:
        """Records an access.

        Args:
          counter: "vm" or "lgkm".
          waves: numbers of the waves that execute it, [n].
          registers: registers that it fills.
          in_order: whether it returns in the order of its counter.
          complete: function that delivers the result; it receives positions within `waves`.

        Raises:
          EmulationError: if another load of one of the registers is in flight.
        """
        # Two loads of one register would return in the order of memory, not of the code.
        for file, number in registers:
            self.check_register(file, number, waves, "loaded")
            self.pending[file][number, waves] += 1
        self._issued[counter][waves] += 1
        order = self._issued[counter][waves]
        waiting = np.ones(len(waves), bool)
        self._accesses.append(Access(counter, waves, order, waiting, in_order, registers, complete))

    def wait(self, counter: str, count: int, is_active: np.ndarray) -> None:
        """Delivers accesses until at most `count` of a counter are in flight.

        Args:
          counter: "vm" or "lgkm".
          count: accesses of the counter that may stay in flight.
          is_active: whether each wave of the machine waits, [waves].
        """
        limit = self._issued[counter] - count
        for access in self._accesses:
            if access.counter != counter or (not access.in_order and count):
                continue
            # Accesses that return out of order are complete only when nothing is in flight.
            returned = access.waiting & is_active[access.waves] & (access.order <= limit[access.waves])
            if returned.any():
                self._deliver(access, np.flatnonzero(returned))
        # Most waits leave few accesses, so that a list is enough.
        self._accesses = [access for access in self._accesses if access.waiting.any()]

    def _deliver(self, access: Access, positions: np.ndarray) -> None:
        access.complete(positions)
        access.waiting[positions] = False
        for file, number in access.registers:
            self.pending[file][number, access.waves[positions]] -= 1

    def check_register(self, file: str, number: int, waves: np.ndarray | slice, what: str) -> None:
        """Checks that no load of a register is in flight.

        Raises:
          EmulationError: if one is.
        """
        # Most instructions are executed while nothing is in flight: ask the cheap question first.
        if self._accesses and self.pending[file][number, waves].any():
            letter = "v" if file == "vector" else "s"
            raise EmulationError(
                "wait", f"{letter}{number} is {what} before s_waitcnt has waited for its load"
            )
