"""Execution of plans on the device: batches, CUDA graphs, device-host copies, swaps."""
