"""Recipes and studies: the experiments to run.

A recipe is a plain function that returns the RunConfig of one run; each row of a paper's table has a recipe. A study
returns several RunConfigs. `resolve_recipe` turns `module:function`, or the path of a config file, and each
`--set a.b=c` of a command line into the RunConfig of a run.

Invariants: recipes hold no logic, and every setting is in the resolved config.json.
"""

from configs.resolve import describe_recipes, explain, resolve_recipe, resolve_study

__all__ = ["describe_recipes", "explain", "resolve_recipe", "resolve_study"]
