"""Files of metrics in a run folder: JSON lines, their repair, and TensorBoard events."""
