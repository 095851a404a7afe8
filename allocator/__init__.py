"""pagetide.allocator: address ranges, extents, blocks and leases. No torch."""
