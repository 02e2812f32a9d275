"""Checkpoints, conversion, data and disks."""
