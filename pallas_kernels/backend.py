"""What kernels are written in: the words that Pallas' Triton backend adds to Pallas, and how a kernel starts.

No other file names that backend. JAX deprecated it in 0.11 and will remove it, and pyproject.toml stays
below the first version that may. CONTRIBUTING.md says what a move would touch (`SECTION`).

A kernel is compiled by Triton on a GPU and interpreted on a CPU. It does not know which, so that the
tests run the very code that is compiled; `exp2` and `narrow` alone know.
"""

import contextvars
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.blocks import KernelSettings

SECTION = "When Pallas' Triton backend goes"
"""Of CONTRIBUTING.md."""
DEPRECATION = "The Pallas Triton backend is deprecated"
"""How the warning begins that jax 0.11 and later give wherever a kernel is lowered."""
PLATFORMS = "cpu", "cuda", "rocm"
"""A kernel is traced once for each."""
_platform: contextvars.ContextVar[str] = contextvars.ContextVar("platform")
"""For which the kernel is that is being traced."""


def advice() -> str:
    """What to do with a jax that has no Triton backend for Pallas, in a sentence."""
    return (
        f"jax {jax.__version__} compiles no Pallas kernel by Triton any more, and ours are written for that: "
        'take implementation="xla", or a jax that does (below 0.13); for a move to jax-triton see '
        f'"{SECTION}" in CONTRIBUTING.md'
    )


def _triton() -> ModuleType:
    """The backend. It is imported here, so that a jax without it still runs all that needs no kernel."""
    try:
        from jax.experimental.pallas import triton
    except ImportError as error:
        raise ValueError(advice()) from error
    return triton


def load(at: Any, mask: jax.Array | None = None, *, other: Any = 0) -> jax.Array:
    """Reads a block from memory.

    Args:
      at: a reference's `at[...]`.
      mask: which entries exist; None for all, which Triton reads in wider pieces.
      other: what the others read as.
    """
    if mask is None:
        return _triton().load(at)
    return _triton().load(at, mask=mask, other=other)


def store(at: Any, values: jax.Array, mask: jax.Array | None = None) -> None:
    """Writes a block to memory, in the array's dtype.

    Args:
      at: a reference's `at[...]`.
      values: of the block.
      mask: which entries are written; None for all.
    """
    _triton().store(at, values.astype(at.dtype), mask=mask)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """The product of two blocks, added up in float32."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


def exp2(x: jax.Array) -> jax.Array:
    """2 to the power of float32 numbers that arithmetic made; below the least normal number it may be 0.

    On AMD one instruction. `jnp.exp2` becomes six there, which keep denormal numbers: in a loop of
    attention they take as long as its products.
    """
    if _platform.get() != "rocm":
        return jnp.exp2(x)
    # LLVM knows the registers of assembly but not its instructions, so that the distances which gfx942
    # leaves to the compiler ([LLVM-AMDGPU] GCNHazardRecognizer.cpp) are kept here. Two wait states behind
    # it: a vector instruction may read the result after one, a matrix instruction after two. The result
    # lies where the argument did: in another register, an earlier matrix instruction could still write.
    (result,) = _triton().elementwise_inline_asm(
        "v_exp_f32 $0, $0\n\ts_nop 1",
        args=[x],
        constraints="=v,0",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct.like(x)],
    )
    return result


def narrow(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds float32 numbers to the nearest of a dtype that goes into products; ties may go either way.

    MI300X has no instruction for bfloat16, and what stands for it takes five: half a unit in the last
    place is added, and the rest cut off, in one and a half.
    """
    if dtype != jnp.bfloat16 or _platform.get() == "cuda":
        return x.astype(dtype)
    # A NaN stays one, unless all of its upper 17 bits but the sign are set. NVIDIA's arithmetic makes such
    # ones. That of AMD and x86 sets the highest bit of the fraction alone, or keeps the bits of an operand,
    # whose lower half is zero where it was bfloat16.
    bits = lax.bitcast_convert_type(x, jnp.uint32) + jnp.uint32(0x8000)
    return lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), dtype)


def from_start(size: int, number: jax.Array) -> Any:
    """The first `size` entries of an axis that may be shorter; a mask keeps to those that exist.

    jax 0.12 refuses such a slice where it knows its start. So the start is a zero that it does not
    know, made of any number that the kernel has at hand.
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
    """Runs a kernel on whole arrays.

    Args:
      kernel: takes references to all operands and then to all results.
      operands: arrays in memory.
      results: a list of `jax.ShapeDtypeStruct`.
      settings: wavefronts and stages of the pipeline.
      grid: programs along up to three axes.
      name: in profiles and in the report of `zaya plan kernels`.

    Returns:
      The results.

    Raises:
      ValueError: if this jax has no Triton backend for Pallas, with `advice`.
    """
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

    branches: Any = {platform: on(platform) for platform in PLATFORMS}
    return tuple(lax.platform_dependent(*operands, **branches))


def _hide_deprecation() -> None:
    """Who runs a kernel cannot mend that its backend goes, and `-W error` would end the program there.

    At every launch, not once at import: pytest and `warnings.catch_warnings` put back the filters that
    they found. The warning comes when the kernel is lowered, just after this.
    """
    warnings.filterwarnings("ignore", message=DEPRECATION, category=DeprecationWarning)
