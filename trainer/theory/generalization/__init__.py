"""Huang et al. 2023: alignment, divergence and concentration bound the error of a nearest-centre classifier."""
