"""Commands on built datasets: verify, preview, trace, bench."""
