"""pagetide.allocator: address ranges, extents and blocks. Pure logic; no torch."""
