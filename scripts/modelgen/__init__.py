"""Random-weight GGUF models: tiny ones for tests, and, by scripts/make_shape_model.py, of the shapes of real ones."""
