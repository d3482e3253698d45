"""The sections of `benchmarks/gpu.py`, one module each: `run(scene)` returns figures and pass lines."""
