"""Scenes, questions and evaluation sets of the demo model (NumPy; Pillow only to write PNG files)."""
