"""The files of a run folder: its events, and reading files that grow."""
