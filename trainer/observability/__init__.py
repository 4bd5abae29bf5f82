"""Metrics, alarms and pictures of a run, and the places where they go besides metrics.jsonl."""

__all__: list[str] = []
