"""Launchers start a run in this process, under torchrun, or on a Slurm cluster.

A launcher takes the name of a recipe and calls `trainer.train.train` once in every rank. No other package imports
launch. Invariant: no launcher changes the result of a run.
"""

__all__: list[str] = []
