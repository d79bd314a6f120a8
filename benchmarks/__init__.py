"""The benchmark of heads_kernels: `python -m benchmarks --help`."""

import os

# Whatever doctor's record whoever runs them has, the order of backends is that of the tables.
os.environ.setdefault("HEADS_KERNELS_DOCTOR", "0")
