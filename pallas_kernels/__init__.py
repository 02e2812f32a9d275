"""Operations of ZAYA1 for which a custom kernel can be faster than XLA's code. Depends on jax alone."""
