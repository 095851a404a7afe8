"""pagetide.common: what every package uses: amounts of memory, checked files, YAML, host memory, texts of errors."""
