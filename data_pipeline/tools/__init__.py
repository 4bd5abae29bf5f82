"""Commands on data: look, verify, preview, trace."""

__all__: list[str] = []
