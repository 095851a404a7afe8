"""Paged attention: what a step tells it, the seam to transformers, the kernels."""
