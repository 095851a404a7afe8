"""pagetide.common: what every package uses: units, checked files, YAML, settings, host memory, heartbeats, texts of errors."""
