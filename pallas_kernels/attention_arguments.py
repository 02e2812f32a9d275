"""What all kernels of attention ask of queries, keys and values.

Letters: B batch, T queries, S keys or slots, N query heads, K key and value heads, H head width.
"""

import jax


def check_heads(q: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, *, queries: str) -> None:
    """Refuses arrays that do not go together.

    Args:
      q: queries, whose last axes are N and H.
      k_BSKH: keys.
      v_BSKH: values.
      queries: their axes, for the message: "[B, T, N, H]" or "[B, N, H]".

    Raises:
      ValueError: with the shapes or types, and what would be right.
    """
    shapes = f"queries {q.shape}, keys {k_BSKH.shape}, values {v_BSKH.shape}"
    if q.ndim != queries.count(",") + 1 or k_BSKH.ndim != 4 or k_BSKH.shape != v_BSKH.shape:
        raise ValueError(f"{shapes}: they must be {queries}, [B, S, K, H] and [B, S, K, H]")
    if q.shape[0] != k_BSKH.shape[0] or q.shape[-1] != k_BSKH.shape[3]:
        raise ValueError(f"{shapes}: they must share the batch B and the head width H")
    if q.shape[-2] % k_BSKH.shape[2]:
        raise ValueError(f"{shapes}: the number of query heads must be a multiple of that of key heads")
    dtypes = [str(x.dtype) for x in (q, k_BSKH, v_BSKH)]
    if len(set(dtypes)) > 1 or dtypes[0] not in ("float32", "bfloat16"):
        raise ValueError(
            f"queries, keys and values are {', '.join(dtypes)}; all must be float32, or all bfloat16"
        )
