"""Markovian RSA, test-time compute by recursive self-aggregation ([ZAYA1-8B] section VI-A)."""
