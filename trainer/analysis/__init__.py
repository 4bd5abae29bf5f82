"""Looking at a run: figures and numbers that explain an accuracy, made from the run directory alone.

Comes in: run directories. Goes out: RUN_DIR/analysis/NAME.json and NAME.png; the report shows both. What may never
happen: an analysis that writes outside its run's analysis/ folder or changes what it looks at.
"""
