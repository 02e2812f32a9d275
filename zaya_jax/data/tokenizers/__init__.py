"""Tokenizers: reading, training and saving them, and the special tokens that they know."""
