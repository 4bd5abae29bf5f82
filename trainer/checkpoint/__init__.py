"""Save and restore the whole state of a run in checkpoints."""
