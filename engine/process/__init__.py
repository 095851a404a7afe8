"""The engine's process: its CPU threads, its memory as the system counts it, its background threads and forks."""
