"""Calibration: profiles of a model, measured on a few prompts with images (`kvedge calibrate`)."""
