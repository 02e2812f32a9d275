"""The supervisor of a run: starts its processes, decides after each failure, and restarts them."""
