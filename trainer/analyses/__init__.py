"""Analyses make figures and numbers that explain an accuracy, from the run directory alone.

Input: run directories. Output: RUN_DIR/analysis/NAME.json and NAME.png, and a quick classifier if an analysis needs one
and there is no probe.

Invariants: an analysis never changes the run's checkpoints, and it draws nothing from global random state.
"""

__all__: list[str] = []
