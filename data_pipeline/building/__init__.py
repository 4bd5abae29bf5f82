"""Make a dataset: draw overlays on a source and write shards."""

__all__: list[str] = []
