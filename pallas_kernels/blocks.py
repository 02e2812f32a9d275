"""Block sizes of kernels: settings, the limits of Triton and MI300X, and masks of partial blocks."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.errors import ArgumentError

LDS_BYTES = 65_536
"""Local memory (LDS) of a workgroup on MI300X, the smallest among the GPUs that these kernels target."""
RACING_TILE_BYTES = 2**22
"""Size of a product's tile, rows * columns * contracted entries, that Triton's AMD backend compiles with a
race if 8 wavefronts share it and its loop is pipelined: a wavefront may store the next block over one that
another wavefront still reads ([Triton-pingpong])."""
MATRIX_TILE = 16
"""Smallest side, in entries, of a block that matrix instructions (MFMA) accept."""
MASKED_SCORE = -1e30
"""Score or logit of a masked entry. With minus infinity, differences of two masked scores would be NaN."""
EMPTY_MAX = -1e29
"""Initial running maximum of a query: far enough above `MASKED_SCORE` that exp(masked - maximum) is 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelSettings:
    """Settings that every kernel has; the settings of each kernel add the sides of its blocks.

    Attributes:
      num_warps: number of wavefronts per program, of 64 lanes each on AMD GPUs and 32 on others.
      num_stages: number of stages of Triton's software pipeline. Each stage after the first keeps another
        copy of the blocks that a loop reads in local memory.
    """

    num_warps: int = 4
    num_stages: int = 1

    def check(
        self, operation: str, *sides: str, part: str = "", min_side: int = MATRIX_TILE, lds_bytes: int = 0
    ) -> None:
        """Checks that Triton can compile these settings and that the blocks fit local memory.

        Args:
          operation: name of the operation, for the message.
          *sides: names of the fields that are sides of blocks.
          part: name of the kernel, where each kernel of an operation has its own settings.
          min_side: smallest side, in entries; below `MATRIX_TILE` where no matrix product reads the block.
          lds_bytes: bytes of local memory for all blocks of one program.

        Raises:
          ArgumentError: with the wrong value and the values that are accepted.
        """
        # Triton accepts only powers of 2 here, and its own message does not name the setting.
        for name in (*sides, "num_warps"):
            size, minimum = getattr(self, name), 1 if name == "num_warps" else min_side
            if not _is_power_of_2(size) or size < minimum:
                raise ArgumentError(
                    f"{operation}: {part and part + '.'}{name} is {size}; "
                    f"a block's side must be a power of 2, at least {minimum}"
                )
        check_counts(operation, {f"{part and part + '.'}num_stages": self.num_stages})
        # Otherwise only the GPU would refuse the kernel, after it has been compiled.
        if lds_bytes > LDS_BYTES:
            raise ArgumentError(
                f"{operation}: {self} needs {lds_bytes:,} bytes of local memory, and a workgroup has "
                f"{LDS_BYTES:,}; use smaller blocks or fewer stages"
            )

    def check_schedule(self, operation: str, part: str, sides: tuple[int, int, int], itemsize: int) -> None:
        """Checks that Triton does not compile a product with the race of `RACING_TILE_BYTES`.

        Args:
          operation: name of the operation, for the message.
          part: name of the kernel's settings, for the message.
          sides: rows, columns and contracted entries of one product.
          itemsize: bytes of an entry of the operands.

        Raises:
          ArgumentError: if it does.
        """
        tile_bytes = math.prod(sides) * itemsize
        if self.num_warps == 8 and self.num_stages > 1 and tile_bytes == RACING_TILE_BYTES:
            raise ArgumentError(
                f"{operation}: {part}: Triton compiles tiles of {sides} with {itemsize} bytes per entry, 8 "
                "wavefronts and a pipeline for AMD GPUs with a race (triton-lang/triton, issue 11696); use "
                "another size, 4 wavefronts or num_stages=1"
            )


def check_counts(operation: str, counts: dict[str, int]) -> None:
    """Checks that settings that are counts are at least 1.

    Args:
      operation: name of the operation, for the message.
      counts: settings by name.

    Raises:
      ArgumentError: with the first wrong setting.
    """
    for name, count in counts.items():
        if count < 1:
            raise ArgumentError(f"{operation}: {name} is {count}; it must be at least 1")


def _is_power_of_2(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def padded(width: int) -> int:
    """Side of a block that holds a whole axis: Triton needs a power of 2, products at least one tile."""
    return max(pl.next_power_of_2(width), MATRIX_TILE)


def valid_mask(first: Any, size: int, end: Any) -> jax.Array | None:
    """Mask of the entries of a block that are before the end of an axis, [size].

    None if the sizes alone show that all are: callers start blocks at multiples of their size and before the
    end, and then read without a mask.

    Args:
      first: index of the block's first entry.
      size: number of entries of the block.
      end: length of the axis; a Python number or a traced one.
    """
    if isinstance(end, int) and end % size == 0:
        return None
    return first + jnp.arange(size) < end


def block_mask(rows: jax.Array | None, columns: jax.Array | None, shape: tuple[int, int]) -> jax.Array | None:
    """Mask of the valid entries of a block, of the given shape; None if all are valid.

    Args:
      rows: mask of valid rows, [shape[0]]; None for all.
      columns: mask of valid columns, [shape[1]]; None for all.
      shape: shape of the block.
    """
    masks = [] if rows is None else [rows[:, None]]
    masks += [] if columns is None else [columns[None, :]]
    return jnp.broadcast_to(functools.reduce(jnp.logical_and, masks), shape) if masks else None
