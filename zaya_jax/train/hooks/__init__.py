"""Hooks of the training loop: checkpoints, metrics, evaluation, health checks, trackers and progress."""
