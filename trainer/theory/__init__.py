"""The theory, runnable: what the papers prove or claim of small models, measured and judged.

Comes in: a name and settings. Goes out: OUT/result.json with a verdict for each claim, and its figures. What may never
happen: a verdict that was not computed from an interval, a random draw that depends on anything but the settings, or a
part of a result that was made with other settings or by other code.
"""
