"""What a run is: the same config, code and data in all processes, on each resume, and in its records."""
