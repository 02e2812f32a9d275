"""Evaluation: the loss of texts, and tasks of the LM Evaluation Harness."""
