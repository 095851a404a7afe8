"""pagetide.engine.collectives: what the shards of a divided model compute together."""
