"""Chat sessions, and the terminal interface of `zaya chat`."""
