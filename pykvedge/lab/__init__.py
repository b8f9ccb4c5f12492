"""The lab has instruments: benchmarks, evaluation, inspection, calibration, checks of stages and machines."""
