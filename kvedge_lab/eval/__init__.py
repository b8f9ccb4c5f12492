"""Evaluation measures what compression costs: the same samples by every method, against the full cache."""
