"""Decoding: sampling, compiled prefill and decode steps, and the continuous-batching engine."""
