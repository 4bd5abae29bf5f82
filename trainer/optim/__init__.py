"""Optimizers, learning-rate schedules and the loss scale."""
