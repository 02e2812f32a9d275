"""Single launches of kernels: lowered, compiled in another process, kept on disk, and emulated."""
