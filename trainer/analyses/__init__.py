"""Analyses make figures and numbers that explain an accuracy, from the run directory alone.

Input: run directories. Output: RUN_DIR/analysis/NAME.json and NAME.png.

Invariants: an analysis never changes the run's checkpoints, and it draws nothing from global random state.
"""

__all__: list[str] = []
