"""Runs and machines that are watched: where a run stands and what befell it, and what a machine can do."""
