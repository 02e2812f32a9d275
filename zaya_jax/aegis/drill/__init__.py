"""Drills: small supervised runs with injected faults, scored by how each fault was handled."""
