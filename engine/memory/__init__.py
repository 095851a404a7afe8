"""The engine's memory: the plan at startup, the lease, and the pool size at run time."""
