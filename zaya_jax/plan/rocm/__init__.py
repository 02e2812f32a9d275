"""XLA's compiler for AMD GPUs, on machines with and without them."""
