"""Probe the checkpoints of runs.

Input: run directories. Output: RUN_DIR/probes/step_*/*.json and tables. The probes themselves are in `trainer.probes`.
"""

__all__: list[str] = []
