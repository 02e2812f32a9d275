"""Documents and records from files: text, JSON lines, Parquet and Arrow."""
