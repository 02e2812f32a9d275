"""Attention: the block, compressed convolutional attention (CCA), and attention over several devices."""
