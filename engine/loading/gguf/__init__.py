"""GGUF files: their header, and the configuration, the tokenizer and the weights that transformers has in place of it."""
