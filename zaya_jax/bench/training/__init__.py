"""Training: optimizers, memory of the loss, comparison with PyTorch."""
