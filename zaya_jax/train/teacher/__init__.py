"""The teacher of a distillation: its predictions, computed once and stored in the run folder."""
