"""Process-level facilities: CPU threads, process memory, background threads, a fair lock and forks."""
