"""The training step as pure functions: state, loss, update, and its metrics."""
