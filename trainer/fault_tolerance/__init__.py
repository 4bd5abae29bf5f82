"""Keep a run going, or end it with a reason: frozen ranks, requests to stop, bad samples, skipped steps."""
