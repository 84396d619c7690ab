"""Measurements, each a command that prints ratios from one run: ``python -m benchmarks.<name>``, or all at once."""
