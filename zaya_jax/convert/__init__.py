"""Weights and configs to and from the layouts of other libraries."""
