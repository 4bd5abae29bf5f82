"""Fetch shards from elsewhere and keep them in a cache."""
