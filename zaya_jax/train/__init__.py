"""The training run: state, loss, step, and the loop around them."""
