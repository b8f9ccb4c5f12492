"""Random-weight GGUF models: tiny models for tests, and models of real shapes (scripts/make_shape_model.py)."""
