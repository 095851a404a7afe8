"""Strings to token ids and back: chat templates, tokenisation, detokenisation, stop strings."""
