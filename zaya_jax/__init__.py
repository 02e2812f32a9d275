"""ZAYA1 in JAX: model, optimiser and training system as pure functions."""
