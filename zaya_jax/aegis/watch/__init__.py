"""Monitoring inside a training process: the watchdog and fault injection, which are hooks of the trainer."""
