"""Model names, checkpoints and weights: what is loaded, how its layers are prepared, and what it needs."""
