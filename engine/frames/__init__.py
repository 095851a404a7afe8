"""Frames of an engine: what watchers see, and recordings."""
