"""pagetide.cache: KV-cache geometry, block tables and the cache manager. Only `storage` imports torch."""
