"""Batch files: `pagetide run` reads requests from a file and writes their results to another."""
