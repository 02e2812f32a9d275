"""Views of a run's history: goodput, timeline, and Prometheus metrics."""
