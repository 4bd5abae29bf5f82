"""Tamkin et al. 2022: feature suppression in a linear contrastive model, in closed form and by gradient descent."""

__all__: list[str] = []
