"""Fetch datasets from http(s) or from commands, and keep them in a cache."""

__all__: list[str] = []
