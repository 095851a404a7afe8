"""Model names, checkpoints and weights: finding, checking and loading models."""
