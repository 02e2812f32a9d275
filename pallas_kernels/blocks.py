"""How a kernel's work is cut into blocks: settings, what of them Triton and MI300X refuse, and masks."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

LDS_BYTES = 65_536
"""Local memory of a workgroup on MI300X, the smallest of the GPUs that these kernels are for."""
MATRIX_TILE = 16
"""Both sides of a block must have this many entries for the matrix instructions (MFMA) to take it."""
HIDDEN = -1e30
"""The score or logit of an entry that does not count. Minus infinity would make NaN of differences."""
BLIND = -1e29
"""The top score of a query that has seen nothing: so far above `HIDDEN` that its exponentials are 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """What can be set of every kernel; each adds the sides of its blocks.

    Attributes:
      num_warps: wavefronts a program; 64 lanes each on AMD's GPUs, 32 on others.
      num_stages: of Triton's software pipeline. Each beyond the first holds another copy of the
        blocks that a loop reads, in local memory.
    """

    num_warps: int = 4
    num_stages: int = 1

    def check(
        self, operation: str, *sides: str, part: str = "", smallest: int = MATRIX_TILE, lds_bytes: int = 0
    ) -> None:
        """Refuses what Triton cannot compile, or what does not fit local memory.

        Args:
          operation: whose settings they are.
          *sides: names of the fields that are sides of blocks.
          part: which of the operation's kernels, where each has its own settings.
          smallest: the least that a side may have: less where it goes into no matrix product.
          lds_bytes: what the blocks that a program holds in local memory take together.

        Raises:
          ValueError: with what is wrong and what would be right.
        """
        for name in (*sides, "num_warps"):
            size, least = getattr(self, name), 1 if name == "num_warps" else smallest
            if not _is_power_of_2(size) or size < least:
                raise ValueError(
                    f"{operation}: {part and part + '.'}{name} is {size}; "
                    f"a block's side must be a power of 2, at least {least}"
                )
        check_counts(operation, {f"{part and part + '.'}num_stages": self.num_stages})
        if lds_bytes > LDS_BYTES:
            raise ValueError(
                f"{operation}: {self} takes {lds_bytes:,} bytes of local memory; there are {LDS_BYTES:,}, so "
                "that smaller blocks or fewer stages are needed"
            )


def check_counts(operation: str, counts: dict[str, int]) -> None:
    """Refuses settings that count something and are below 1.

    Args:
      operation: whose settings they are.
      counts: by name.

    Raises:
      ValueError: with the first that is wrong.
    """
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{operation}: {name} is {count}; it must be at least 1")


def _is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def padded(width: int) -> int:
    """Entries of a block that holds a whole axis: Triton takes powers of 2, products at least a tile."""
    return max(pl.next_power_of_2(width), MATRIX_TILE)


def which_exist(first: Any, size: int, end: Any) -> jax.Array | None:
    """Which entries of a block lie before the end of an axis, [size].

    None where all do by the sizes alone: those who start blocks at multiples of their size, and none
    behind the end, then read without a mask.

    Args:
      first: the block's first entry.
      size: entries of the block.
      end: of the axis; a number, or traced.
    """
    if isinstance(end, int) and end % size == 0:
        return None
    return first + jnp.arange(size) < end


def block_mask(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """Which entries of a block exist, of the given shape; None where all do.

    Args:
      rows: which rows exist; None for all.
      columns: which columns exist; None for all.
      shape: of the block.
    """
    masks = [] if rows is None else [rows[:, None]]
    masks += [] if columns is None else [columns[None, :]]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape) if masks else None
