"""Operations of ZAYA1 where a kernel of one's own can beat what XLA makes. Needs jax alone."""
