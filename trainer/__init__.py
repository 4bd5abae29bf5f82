"""Batches to loss to checkpoint to report.

A batch of pictures becomes two *views*, by an expert policy or by a trained viewmaker. An *encoder* maps the views to
embeddings, an *objective* compares these, and an *engine* turns the loss into one step of each trained module: the
encoder, and the viewmaker if there is one. A run writes everything into its run directory. Whatever reads a run (probe,
analysis, report, restart) reads that directory and nothing else. Invariant: no number depends on how many ranks
computed it.

    batch -> views -> encoder -> objective -> engine -> checkpoint -> probe -> report
"""
