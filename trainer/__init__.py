"""Batches to loss to checkpoint to report.

A batch of pictures becomes two *views* (by an expert policy or by a trained viewmaker), an *encoder* maps them to
embeddings, an *objective* compares those, and an *engine* turns the loss into one step of each *player* (encoder, and
viewmaker where there is one). Everything a run leaves behind lies in its run directory, and everything that reads a run
(probe, analysis, report, restart) reads that directory and nothing else. What may never happen: a number that depends
on how many ranks computed it.

    batch -> views -> encoder -> objective -> engine -> checkpoint -> probe -> report
"""
