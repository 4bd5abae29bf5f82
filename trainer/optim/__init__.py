"""Optimizers, learning-rate schedules and the loss scale."""

__all__: list[str] = []
