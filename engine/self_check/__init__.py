"""The self-check of a CUDA device: tests each device-dependent part once, in a separate process."""
