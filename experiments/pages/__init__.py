"""Training, conversion and measurement of the second model, which reads pages (see experiments/train_pages.py)."""
