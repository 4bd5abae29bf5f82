"""A package of somebody else: an objective, a view, an encoder, an overlay, a dataset and recipes of its own."""
