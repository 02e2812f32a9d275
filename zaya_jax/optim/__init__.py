"""How weights and router biases move."""
