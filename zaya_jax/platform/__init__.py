"""What the compiler and the C library are told of the machine that a run is on."""
