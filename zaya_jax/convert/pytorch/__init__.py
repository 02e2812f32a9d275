"""Folders of PyTorch weights: layouts, configs, safetensors files."""
