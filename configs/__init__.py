"""Recipes and studies: WHAT to run.

A recipe is a plain function that returns a RunConfig, one for each row of a paper's table. A study returns several.
`resolve_recipe` turns `module:function` (or the path of a config file) and each `--set a.b=c` of a command line into
the RunConfig of a run.

Invariants: recipes hold no logic, and every setting is in the resolved config.json.
"""

from configs.resolve import describe_recipes, explain, resolve_recipe, resolve_study

__all__ = ["describe_recipes", "explain", "resolve_recipe", "resolve_study"]
