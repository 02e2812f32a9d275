"""Checks of a machine's hardware and software, with advice on what to change before training on it."""
