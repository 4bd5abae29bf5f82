"""A package of somebody else: objective, view, encoder, engine, overlay, dataset and recipes of its own."""
