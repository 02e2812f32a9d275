"""How all kernels start: compiled by Triton on a GPU, interpreted on a CPU.

Nothing else knows which of the two it is, so that the tests run the very code that is compiled.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

LDS_BYTES = 65_536
"""Local memory of a workgroup on MI300X, the smallest of the GPUs that these kernels are for."""
MATRIX_TILE = 16
"""Both sides of a block must have this many entries for the matrix instructions (MFMA) to take it."""


def from_start(size: int, number: jax.Array) -> Any:
    """The first `size` entries of an axis that may be shorter; a mask keeps to those that exist.

    jax 0.12 refuses such a slice where it knows its start. So the start is a zero that it does not
    know, made of any number that the kernel has at hand.
    """
    return pl.ds(number * 0, size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """How a kernel is started.

    Attributes:
      grid: programs along up to three axes.
      num_warps: wavefronts a program; 64 lanes each on AMD's GPUs, 32 on others.
      num_stages: of Triton's software pipeline. Each beyond the first holds another copy of the
        blocks that a loop reads.
      name: in profiles and in the report of `zaya plan kernels`.
    """

    grid: tuple[int, ...]
    num_warps: int
    name: str
    num_stages: int = 1


def launch(
    kernel: Callable[..., None], operands: Sequence[jax.Array], out: Any, how: Launch
) -> tuple[jax.Array, ...]:
    """Runs a kernel on whole arrays: its references are the operands, then the results.

    Args:
      kernel: takes references to all operands and all results.
      operands: arrays in memory.
      out: a list of `jax.ShapeDtypeStruct`, the results.
      how: to start it.
    """
    params = triton.CompilerParams(num_warps=how.num_warps, num_stages=how.num_stages)

    def named(*references):
        kernel(*references)

    named.__name__ = named.__qualname__ = how.name  # Triton calls the kernel by its function's name
    compiled = pl.pallas_call(named, out_shape=out, grid=how.grid, compiler_params=params, name=how.name)
    interpreted = pl.pallas_call(named, out_shape=out, grid=how.grid, interpret=True, name=how.name)
    return tuple(lax.platform_dependent(*operands, cpu=interpreted, default=compiled))


def is_power_of_2(number: int) -> bool:
    """Whether Triton takes a block with a side of this many entries."""
    return number > 0 and number & (number - 1) == 0


def check_blocks(operation: str, sizes: dict[str, int], *, smallest: int = 1) -> None:
    """Refuses sides of blocks that Triton cannot compile.

    Args:
      operation: whose blocks they are.
      sizes: entries along each side.
      smallest: the least that a side may have: `MATRIX_TILE` where it goes into a matrix product.

    Raises:
      ValueError: with the side that is wrong and what would be right.
    """
    for name, size in sizes.items():
        if not is_power_of_2(size) or size < smallest:
            raise ValueError(
                f"{operation}: {name} is {size}; a block's side must be a power of 2, at least {smallest}"
            )


def check_lds(operation: str, num_bytes: int, blocks: Any) -> None:
    """Refuses blocks that do not fit local memory.

    Args:
      operation: whose blocks they are.
      num_bytes: what the blocks that a program holds in local memory take together.
      blocks: the settings, for the message.

    Raises:
      ValueError: with what they take and what there is.
    """
    if num_bytes > LDS_BYTES:
        raise ValueError(
            f"{operation}: {blocks} takes {num_bytes:,} bytes of local memory; there are {LDS_BYTES:,}, so "
            "that smaller blocks or fewer stages are needed"
        )
