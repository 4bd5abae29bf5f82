"""The parts that all experiments share: running and saving, claims and verdicts, figures."""

__all__: list[str] = []
