"""Failure detection and recovery: node agents, supervisor, machine checks, drills, and run history."""
