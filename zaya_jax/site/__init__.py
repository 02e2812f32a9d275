"""Builds the documentation website from `docs/`, docstrings, commands, config fields and notebooks.

`python -m zaya_jax.site OUT` builds it from a checkout, with Sphinx. A link that leads nowhere is an error.
"""
