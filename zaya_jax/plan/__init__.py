"""What a run needs, before it is started."""
