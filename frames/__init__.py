"""Frames: what an engine's blocks and requests are at a step border, as JSON lines, for the page and for recordings."""
