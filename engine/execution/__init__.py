"""Plans carried out on the device: batches, graphs, copies between device and host, swaps."""
