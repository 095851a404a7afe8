"""The engine's memory: the plan at the start, the lease, and the size of the pool while it runs."""
