"""Huang et al. 2023: bound the error of a nearest-centre classifier by alignment, divergence and concentration."""

__all__: list[str] = []
