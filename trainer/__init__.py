"""Train, probe, analyse and report: from batches to a loss, a checkpoint and a report.

An expert policy or a trained viewmaker turns a batch of pictures into two *views*. An *encoder* maps the views to
embeddings, an *objective* compares them, and an *engine* turns the loss into one step of each trained module: the
encoder, and the viewmaker if there is one. A run writes everything into its run directory. Probe, analysis, report and
restart read only this directory. Invariant: results do not depend on the number of ranks.

    batch -> views -> encoder -> objective -> engine -> checkpoint -> probe -> report
"""
