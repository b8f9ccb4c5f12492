"""Measures what compression costs: every method on the same samples, compared with the full cache."""
