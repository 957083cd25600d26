"""A model's gradients: how layers lie in memory, how they travel, and which plan does it best."""
