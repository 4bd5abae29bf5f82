"""Predict the needs of a run before it starts: memory, messages, and the fewest micro batches that fit."""

__all__: list[str] = []
