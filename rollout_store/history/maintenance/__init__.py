"""Maintenance of one history: compaction, trimming, eviction and expiry."""
