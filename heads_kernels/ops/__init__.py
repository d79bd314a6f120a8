"""The operators as torch ops, and the backends that run them.

attention.py, statistics.py   the ops: schema, fake, FLOPs, autograd
eager.py, cpu.py, cuda.py, triton/   the backends (see `heads_kernels.backends`)
direct.py   calls on the CPU without an op
sharding.py   calls with DTensors
"""
