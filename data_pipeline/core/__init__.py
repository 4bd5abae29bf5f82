"""Errors, config schemas, random keys, progress, the sample and the system: what every other room needs."""

__all__: list[str] = []
