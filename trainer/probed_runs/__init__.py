"""Runs are probed: the checkpoints of one, several in processes of their own, and the features of several together.

Input: run directories. Output: RUN_DIR/probes/step_*/*.json and tables. The probes themselves are in `trainer.probes`.
"""

__all__: list[str] = []
