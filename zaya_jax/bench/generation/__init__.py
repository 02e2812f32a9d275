"""Generation speed and memory, compared with transformers."""
