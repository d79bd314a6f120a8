"""The benchmark of heads_kernels: `python -m benchmarks --help`."""

import os

os.environ.setdefault(
    "HEADS_KERNELS_DOCTOR", "0"
)  # no record of whoever runs them: the order of the tables
