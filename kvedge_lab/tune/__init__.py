"""A model is measured against its own full cache, without labels: which plan fits it, and how sure that is."""
