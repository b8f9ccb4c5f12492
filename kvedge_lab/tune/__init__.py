"""Measures a model against its full cache, without labels: which plan fits the model, and how sure that is."""
