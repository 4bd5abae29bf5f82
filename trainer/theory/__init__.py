"""The theory as experiments: what the papers prove or claim about small models, measured and judged.

In: a name and settings. Out: OUT/result.json with a verdict for each claim, and figures.

Invariants: every verdict follows from an interval. Every random draw depends on the settings alone. Every part of a
result was computed with the same settings and the same code.
"""
