"""pagetide.common: what every package uses: units, checked files, YAML, host memory, heartbeats, texts of errors."""
