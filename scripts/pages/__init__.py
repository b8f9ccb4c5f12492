"""Training, conversion and measurement of the second model, which reads pages (see scripts/train_pages.py)."""
