"""Training, conversion and measurement of the demo model (see scripts/train_demo.py)."""
