"""Looking at a run: figures and numbers that explain an accuracy, made from the run directory alone.

Comes in: run directories. Goes out: RUN_DIR/analysis/NAME.json and NAME.png; and, where the probe left no classifier
that an analysis needs, one in its place. What may never happen: an analysis that changes what it looks at, or that
draws from ambient random state.
"""
