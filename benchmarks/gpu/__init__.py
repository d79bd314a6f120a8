"""The stages of the GPU suite: what is checked and timed on one GPU; see `benchmarks/gpu_suite.py`."""
