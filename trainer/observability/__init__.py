"""Metrics, alarms and pictures of a run, and where they go besides metrics.jsonl."""
