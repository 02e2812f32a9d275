"""Detection of stragglers: processes and devices that are steadily slower than the others."""
