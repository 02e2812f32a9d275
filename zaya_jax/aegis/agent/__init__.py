"""The agent on each node: classifies log lines and sensor readings, and records signs of failing hardware."""
