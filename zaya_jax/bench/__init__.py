"""Measurements: what was compared, the bound from physics, and both figures."""
