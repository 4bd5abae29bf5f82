"""The page of the suppression benchmark: settings in which one feature suppresses another, and cures.

    run directories -> measured -> verdicts, published -> page, figures -> as_markdown

A run belongs to a cell of the benchmark by its factors (`tracking.factors`): the setting, its difficulty and the cure.
"""

__all__: list[str] = []
