"""Time and bandwidth of collectives by size and group of devices."""
