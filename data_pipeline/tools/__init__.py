"""Commands on built datasets: verify, preview, trace, bench."""

__all__: list[str] = []
