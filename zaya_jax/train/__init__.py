"""Training: setup, the loop and its hooks, and the step as pure functions."""
