"""The machine and its software: compiler options, host memory, signals, versions, shell commands."""
