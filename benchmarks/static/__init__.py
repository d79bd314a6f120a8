"""Static evidence: what the GPU kernels take of a GPU, read from their machine code where no GPU can be had.

After the first run on a GPU, measured times replace the upper limits of `model`: delete `model`, `sass`, `pipes` and
`benchmarks/results/static-model.json` then. `ahead_of_time`, `binaries` and `cuda_resources` remain, for the targets of
which there is no GPU.
"""
