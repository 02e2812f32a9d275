"""What the compiler and the C library are told of a run's machine, and what is installed on it."""
