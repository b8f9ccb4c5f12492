"""Measures profiles of a model on a few prompts with images (`kvedge calibrate`)."""
