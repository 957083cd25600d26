"""A model's gradients: their place in memory, their exchange, and the choice of a plan."""
