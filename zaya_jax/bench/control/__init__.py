"""Cost of the control plane: start, agreement and commit of many processes, measured and simulated."""
