"""Analyses: figures and numbers that explain an accuracy, made from the run directory alone.

In: run directories. Out: RUN_DIR/analysis/NAME.json and NAME.png; and a quick classifier if an analysis needs one and
the probe left none.

Invariants: an analysis never changes the run's checkpoints, and it draws nothing from global random state.
"""
