"""Sampling: logits processors, constraints, penalties, draws and log-probabilities."""
