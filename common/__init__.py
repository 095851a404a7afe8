"""pagetide.common: what all packages use: child processes, units, checked files, YAML, settings, host memory, heartbeats."""
