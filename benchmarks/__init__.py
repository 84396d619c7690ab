"""Measurements, each a command that prints ratios from one run."""
