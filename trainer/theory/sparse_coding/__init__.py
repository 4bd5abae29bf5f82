"""Wen and Li 2021: contrastive learning of one layer on sparsely coded data, with and without random masks."""

__all__: list[str] = []
