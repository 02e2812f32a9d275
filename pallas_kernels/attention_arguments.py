"""Checks of the arguments that all attention kernels share.

Letters: B batch, T queries, S keys or slots, N query heads, K key and value heads, H head width.
"""

import jax

from pallas_kernels.errors import ArgumentError


def check_heads(q: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, queries: str) -> None:
    """Checks that queries, keys and values have matching shapes and types.

    Args:
      q: queries, with last axes N and H.
      k_BSKH: keys, [B, S, K, H].
      v_BSKH: values, [B, S, K, H].
      queries: axes of the queries, for the error message: "[B, T, N, H]" or "[B, N, H]".

    Raises:
      ArgumentError: with the shapes or types, and the ones that are required.
    """
    shapes = f"queries {q.shape}, keys {k_BSKH.shape}, values {v_BSKH.shape}"
    if q.ndim != queries.count(",") + 1 or k_BSKH.ndim != 4 or k_BSKH.shape != v_BSKH.shape:
        raise ArgumentError(f"{shapes}: they must be {queries}, [B, S, K, H] and [B, S, K, H]")
    if q.shape[0] != k_BSKH.shape[0] or q.shape[-1] != k_BSKH.shape[3]:
        raise ArgumentError(f"{shapes}: they must share the batch B and the head width H")
    # Grouped-query attention: query head n reads key head n // (N / K).
    if q.shape[-2] % k_BSKH.shape[2]:
        raise ArgumentError(f"{shapes}: the number of query heads must be a multiple of that of key heads")
    # One type for all: a product of mixed types would be converted inside of the kernel's main loop.
    dtypes = [str(x.dtype) for x in (q, k_BSKH, v_BSKH)]
    if len(set(dtypes)) > 1 or dtypes[0] not in ("float32", "bfloat16"):
        raise ArgumentError(
            f"queries, keys and values are {', '.join(dtypes)}; all must be float32, or all bfloat16"
        )
