"""From logits to tokens: processors, constraints, penalties, draws and log-probabilities."""
