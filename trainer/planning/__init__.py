"""Predict what a run needs before it starts: memory, messages, and the fewest micro batches that fit."""
