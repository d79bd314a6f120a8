"""Static evidence: what the GPU kernels take of a GPU, read from their machine code, where no GPU can be had.

ahead_of_time    Triton's kernels, compiled for several GPUs: bounds on spilled bytes (`STATED`), serialized products
                 (`SERIALIZED`), shared memory and tensor cores, with the reason for each exception
cuda_resources   registers and stack of the built CUDA kernels
loops            instructions of the loops of both, beside those of a kept run
binaries, sass   compiling without a GPU; loops in machine code
"""
