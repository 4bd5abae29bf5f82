"""Fetch datasets from http(s) or from commands, and keep them in a cache."""
