"""Instruments: benchmarks, evaluation, inspection and calibration. The runtime, pykvedge, works without them."""
