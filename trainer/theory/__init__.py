"""Experiments on the theory of three papers: each claim about a small model is measured and judged.

In: the name of an experiment and its settings. Out: OUT/result.json with a verdict for each claim, and figures.

Invariants: every verdict follows from an interval. Every random draw depends on the settings alone.
"""

__all__: list[str] = []
