"""The primitives of Pallas' Triton backend that our kernels use, and the function that launches a kernel.

No other file names that backend. JAX deprecated it in 0.11 and will remove it, and pyproject.toml stays
below the first version that may do so. CONTRIBUTING.md lists what a move would touch (`SECTION`).

Triton compiles a kernel on a GPU; on a CPU Pallas interprets it. Kernels do not depend on the platform, so
that tests run the code that is compiled; only `exp2` and `narrow` differ by platform.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.blocks import KernelSettings, block_mask
from pallas_kernels.errors import ArgumentError
from pallas_kernels.precision import matmul

SECTION = "When Pallas' Triton backend goes"
"""Title of the section of CONTRIBUTING.md about a jax without this backend."""
DEPRECATION = "The Pallas Triton backend is deprecated"
"""First words of the warning that jax 0.11 and later emit whenever a kernel is lowered."""
PLATFORMS = "cpu", "cuda", "rocm"
"""Platforms for each of which a kernel is traced once."""
_platform: contextvars.ContextVar[str] = contextvars.ContextVar("platform")
"""Platform of the kernel that is being traced."""
Executor = Callable[[Callable[..., Any], Sequence[jax.Array], Sequence[jax.ShapeDtypeStruct], str], Any]
"""Replacement of a launch: a function of the Pallas call for ROCm, the operands, the results' shapes and
dtypes, and the kernel's name. It returns the output arrays."""
# jax keeps what it has traced; a user context is part of the keys of its caches.
_executor: Any = jax.make_user_context(None)
"""The executor of launches; None for Pallas."""


def execute_launches(executor: Executor) -> contextlib.AbstractContextManager[None]:
    """Returns a context in which an executor replaces all launches of this thread.

    Functions that jax traced outside are traced again inside, and with each other executor.

    Args:
      executor: hashable function that is called when a launch is traced; its operands may be tracers.
    """
    return _executor(executor)


def advice() -> str:
    """One sentence that says what to do when this jax has no Triton backend for Pallas."""
    return (
        f"jax {jax.__version__} no longer compiles Pallas kernels with Triton, which these kernels need: "
        'use implementation="xla", or a jax below 0.13; for a move to jax-triton see '
        f'"{SECTION}" in CONTRIBUTING.md'
    )


def _triton() -> ModuleType:
    """Imports the backend late, so that a jax without it still runs everything that needs no kernel."""
    try:
        from jax.experimental.pallas import triton
    except ImportError as error:
        raise ArgumentError(advice()) from error
    return triton


def load(at: Any, mask: jax.Array | None = None, *, other: Any = 0) -> jax.Array:
    """Reads a block from memory.

    Args:
      at: the block, as `reference.at[...]`.
      mask: entries to read, of the block's shape; None reads all, which Triton does with wider instructions.
      other: value of the entries that the mask excludes.
    """
    if mask is None:
        return _triton().load(at)
    return _triton().load(at, mask=mask, other=other)


def load_transposed(
    array: Any,
    rows: jax.Array,
    columns: jax.Array,
    *,
    first: tuple[Any, ...] = (),
    is_row: jax.Array | None = None,
    is_column: jax.Array | None = None,
) -> jax.Array:
    """Reads a block of a row-major matrix as its transpose, [columns, rows]; masked entries are zeros.

    For the right factor of a product that contracts the columns.

    Args:
      array: reference to a matrix, or to several.
      rows: indices of the block's rows.
      columns: indices of its columns.
      first: indices before those of the rows.
      is_row: mask of the rows to read; None reads all.
      is_column: mask of the columns to read; None reads all.
    """
    # Not `load(...).T`: Triton's pipeline keeps what it reads ahead in local memory, and swizzles a block
    # only if the product reads it as it was loaded. Otherwise the lanes that read one column of rows of 64
    # bytes share four banks, and eight of them wait for each other.
    at = array.at[(*first, rows[None, :], columns[:, None])]
    return load(at, block_mask(is_column, is_row, (columns.shape[0], rows.shape[0])))


def store(at: Any, values: jax.Array, mask: jax.Array | None = None) -> None:
    """Writes a block to memory, in the array's dtype.

    Args:
      at: the block, as `reference.at[...]`.
      values: entries of the block; they are converted to the array's dtype.
      mask: entries to write, of the block's shape; None writes all.
    """
    _triton().store(at, values.astype(at.dtype), mask=mask)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Matrix product of two blocks, accumulated in float32 (MFMA on AMD GPUs)."""
    return matmul(a, b, dtype=jnp.float32)


def exp2(x: jax.Array) -> jax.Array:
    """2 to the power of x, for float32 results of arithmetic; denormal results may become 0.

    One instruction on AMD GPUs. `jnp.exp2` becomes six there, because it keeps denormal numbers; in the main
    loop of attention they take as long as its products.
    """
    if _platform.get() != "rocm":
        return jnp.exp2(x)
    # LLVM sees the registers of inline assembly but not its instructions, so that the wait states which
    # gfx942 leaves to the compiler ([LLVM-AMDGPU] GCNHazardRecognizer.cpp) are kept here: after v_exp_f32, a
    # vector instruction may read the result after one wait state and a matrix instruction after two, hence
    # s_nop 1. The result shares the argument's register (constraint 0): an earlier matrix instruction might
    # still write to any other one.
    (result,) = _triton().elementwise_inline_asm(
        "v_exp_f32 $0, $0\n\ts_nop 1",
        args=[x],
        constraints="=v,0",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct.like(x)],
    )
    return result


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 numbers to the nearest number of a dtype for products; ties may be rounded either way.

    MI300X has no instruction that converts to bfloat16, and the exact conversion takes five instructions per
    number. Adding half a unit in the last place and truncating takes one and a half.
    """
    if dtype != jnp.bfloat16 or _platform.get() == "cuda":
        return x.astype(dtype)
    # A NaN stays a NaN unless all of its upper 17 bits except the sign are set: then the addition overflows.
    # NVIDIA's arithmetic produces such NaNs. Arithmetic on AMD and x86 sets only the highest bit of the
    # fraction, or keeps the bits of an operand, whose lower half is zero where it was bfloat16.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), dtype)


def from_start(size: int, number: jax.Array) -> Any:
    """Slice of the first `size` entries of an axis that may be shorter; loads must mask the rest.

    jax 0.12 rejects a slice beyond the end when its start is a constant. Therefore the start is a zero that
    jax cannot see through, computed from a number that the kernel has anyway.
    """
    return pl.ds(number * 0, size)


def launch(
    kernel: Callable[..., None],
    operands: Sequence[jax.Array],
    results: Any,
    settings: KernelSettings,
    *,
    grid: tuple[int, ...],
    name: str,
) -> tuple[jax.Array, ...]:
    """Launches a kernel on whole arrays.

    Args:
      kernel: function of references to all operands, followed by references to all results.
      operands: input arrays in device memory.
      results: shapes and dtypes of the outputs, a list of `jax.ShapeDtypeStruct`.
      settings: number of wavefronts and of pipeline stages.
      grid: number of programs along up to three axes.
      name: name of the kernel in profiles and in the report of `zaya plan kernels`.

    Returns:
      The output arrays, one for each entry of `results`; zeros if an operand or the grid is empty.

    `execute_launches` replaces what happens here.

    Raises:
      ArgumentError: if this jax has no Triton backend for Pallas, with `advice`.
    """
    # Pallas accepts no empty grid. Sums over no rows, and all that has none, are zeros.
    if 0 in grid or not all(x.size for x in operands):
        return tuple(jnp.zeros(result.shape, result.dtype) for result in results)
    # Without parameters that name Triton, jax 0.10 lowers for Mosaic, which knows no AMD GPU.
    params = _triton().CompilerParams(num_warps=settings.num_warps, num_stages=settings.num_stages)
    _hide_deprecation()

    def on(platform: str) -> Callable[..., Any]:
        def named(*references):
            token = _platform.set(platform)
            try:
                kernel(*references)
            finally:
                _platform.reset(token)

        named.__name__ = named.__qualname__ = name  # Triton calls the kernel by its function's name
        if platform == "cpu":
            return pl.pallas_call(named, out_shape=results, grid=grid, interpret=True, name=name)
        return pl.pallas_call(named, out_shape=results, grid=grid, compiler_params=params, name=name)

    if (executor := _executor.value) is not None:
        return tuple(executor(on("rocm"), operands, results, name))
    # One trace for each platform: a program may be compiled here for GPUs that this machine does not have.
    branches: Any = {platform: on(platform) for platform in PLATFORMS}
    return tuple(lax.platform_dependent(*operands, **branches))


def _hide_deprecation() -> None:
    """Silences the deprecation warning of the backend, which users of a kernel can do nothing about.

    With `-W error` it would end the program. The filter is set at every launch, not once at import, because
    pytest and `warnings.catch_warnings` restore the filters they found. jax emits the warning when it lowers
    the kernel, just after this call.
    """
    warnings.filterwarnings("ignore", message=DEPRECATION, category=DeprecationWarning)
