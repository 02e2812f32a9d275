"""The HTTP server: connections, limits, authentication, errors, static files."""
