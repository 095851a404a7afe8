"""Benchmarks: each compares side by side in one run, prints a table, and writes figures with --json FILE."""
