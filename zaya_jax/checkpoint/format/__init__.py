"""Files of a checkpoint: their names, hashes and description, and weights that are written without Orbax."""
