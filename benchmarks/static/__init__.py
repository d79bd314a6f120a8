"""Static evidence: what the GPU kernels take of a GPU, read from their machine code where no GPU can be had.

Each line of the table of `model` is a loop that contains tensor-core instructions:

hot      instructions of one warp on the hot path: a full tile with aligned copies (see `sass`). Triton kernels have a
         second loop for partial tiles
inner    loops inside of it; those with tensor-core instructions have a line of their own, others count as one iteration
cycles   of one multiprocessor for one iteration of one block, for each pipe alone (see `pipes`)
TFLOP/s  the rate if the slowest pipe alone took time: an upper limit, without latencies, barriers and memory
alone    on sm_90, instructions of the hot path while no product is under way: from a wait to the start of the next
serial   cycles of the products and of those instructions, which run one after the other if a multiprocessor has one
         program
#1, #2   other kernels with the same name, such as the one for closed heads

`benchmarks/results/static-model.json` keeps the numbers of a few calls, and `tests/tools/test_static_model.py` compares
the kernels with them. A loop that takes more, or another number of loops, fails the test. If that is intended, or after
an improvement, `python -m benchmarks.static.model --keep` rewrites the numbers (build the CUDA module from the same
sources first, or rewrite Triton's alone with `--backend triton`), and the commit message says why. Numbers are compared
only between equal compiler versions. Bounds on whole kernels, with the reason for each exception, are in
`ahead_of_time`: `STATED` (spilled bytes) and `SERIALIZED` (products that ptxas serializes).

After the first run on a GPU, measured times replace the upper limits of `model`: delete `model`, `sass`, `pipes` and
`benchmarks/results/static-model.json` then. `ahead_of_time`, `binaries` and `cuda_resources` remain, for the targets of
which there is no GPU.
"""
