"""Laws of the cache's pure parts: eviction policies, prices, checksums."""
