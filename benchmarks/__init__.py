"""The benchmark of heads_kernels: `python -m benchmarks --help`."""
