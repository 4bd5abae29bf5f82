"""Predict the memory of a run before it starts, and the fewest micro batches that fit."""

__all__: list[str] = []
