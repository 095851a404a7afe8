"""pagetide.cache: geometry, block tables, the cache manager; torch only in `storage`."""
