"""Keep a run going, or end it with a reason: frozen ranks, stop requests, bad samples, skipped steps."""

__all__: list[str] = []
