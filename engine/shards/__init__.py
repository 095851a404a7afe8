"""pagetide.engine.shards: a model divided over several devices, a process for each of its shards."""
