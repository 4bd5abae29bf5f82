"""WHERE a run runs: in this process, under torchrun, on a Slurm cluster, or as the demo.

In comes a recipe's name, out goes `trainer.train.train`, called once in every rank. Nothing imports launch, and nothing
here decides what is computed. What may never happen: a launcher that changes the science.
"""
