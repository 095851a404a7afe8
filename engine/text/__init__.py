"""Text and token ids: chat templates, tokenization, detokenization, stop strings."""
