"""What a GPU is needed for to measure: `python -m benchmarks.gpu`. See docs/gpu.md."""
