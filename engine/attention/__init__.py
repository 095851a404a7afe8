"""Paged attention: step context, transformers interface, kernels."""
