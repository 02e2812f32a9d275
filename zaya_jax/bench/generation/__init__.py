"""Latency of requests at the engine under load."""
