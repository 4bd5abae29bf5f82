"""Save and restore the whole state of a run in checkpoints."""

__all__: list[str] = []
