"""Instruments: benchmarks, evaluation, inspection, calibration, checks of stages and of the machine."""
