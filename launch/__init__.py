"""Launchers: WHERE a run trains: in this process, under torchrun, on a Slurm cluster, or as the demo.

A launcher takes the name of a recipe and calls `trainer.train.train` once in every rank. Nothing imports launch.
Invariant: no launcher changes what is computed.
"""
