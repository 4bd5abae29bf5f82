"""Optimizers, learning-rate schedules and skipped steps."""

__all__: list[str] = []
