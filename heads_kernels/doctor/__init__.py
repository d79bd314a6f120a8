"""`python -m heads_kernels doctor`: every backend on this machine held to the accuracy rule, and timed against SDPA."""
