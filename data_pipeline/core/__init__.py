"""Errors, config schemas, random keys, progress and the sample: what every other room needs."""
