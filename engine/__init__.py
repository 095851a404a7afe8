"""pagetide.engine: loads a model and runs it out of paged blocks."""
