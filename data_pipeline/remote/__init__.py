"""Fetch datasets from web servers and object stores, and keep them in a cache."""

__all__: list[str] = []
