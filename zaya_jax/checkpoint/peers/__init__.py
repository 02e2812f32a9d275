"""Copies of train states in the memory of nodes, and the choice of those to restore from."""
