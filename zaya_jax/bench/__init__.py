"""Benchmarks: each reports what was compared, the physical bound, and both figures."""
