"""Random-weight GGUF models: what scripts/make_tiny_models.py and scripts/make_shape_model.py share."""
