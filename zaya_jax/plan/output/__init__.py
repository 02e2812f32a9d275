"""Plans as data, tables and pictures."""
