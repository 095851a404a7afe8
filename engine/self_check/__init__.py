"""The self-check of a CUDA device: each part that a device may break is tried once, in a process of its own."""
