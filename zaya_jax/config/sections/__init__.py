"""Sections of a run's config, one module each: fields, defaults and validation."""
