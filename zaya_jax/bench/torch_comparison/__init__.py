"""Our speed compared with transformers, eager and under `torch.compile`, on the same weights."""
