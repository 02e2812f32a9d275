"""Skips the tests that need AMD's tables of instructions if their package is not installed."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("tinygrad") else ["test_instructions.py", "test_hazards.py"]
collect_ignore += [] if importlib.util.find_spec("tinygrad") else ["test_matrix_layouts.py"]
