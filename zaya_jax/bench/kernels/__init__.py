"""Pallas kernels, matrix products and memory bandwidth."""
