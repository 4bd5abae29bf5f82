"""Wen and Li 2021: one-layer contrastive learning on sparsely coded data, with random masks."""
