"""Sizing of runs for a cluster: by arithmetic, and by compiling the train step without a GPU."""
