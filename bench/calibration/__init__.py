"""The parts of `python -m bench.calibrate`: a capture of engines, its replay on the plant, the fit, NVIDIA's data."""
