"""Commands of `zaya` that combine several packages."""
