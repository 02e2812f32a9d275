"""Quantized weights: codecs, the forms in which releases store them, reading, export and errors."""
