"""Instruments: benchmarks, evaluation, inspection and calibration. The runtime, pykvedge, does without this package."""
