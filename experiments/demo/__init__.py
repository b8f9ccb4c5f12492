"""Training, conversion and measurement of the demo model (see experiments/train_demo.py)."""
