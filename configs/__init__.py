"""WHAT to run: recipes, plain functions that return a RunConfig, one for each row of a paper's table; and studies,
which return several.

`resolve_recipe` turns a command line's `module:function` (or the path of a config file) and its `--set a.b=c` into the
one RunConfig of a run. What may never happen: logic, or a setting that is not in the resolved config.json.
"""

from configs.resolve import describe_recipes, explain, resolve_recipe, resolve_study

__all__ = ["describe_recipes", "explain", "resolve_recipe", "resolve_study"]
