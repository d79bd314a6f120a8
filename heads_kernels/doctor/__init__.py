"""`python -m heads_kernels doctor`: every backend on this machine held to the accuracy rule, and timed against SDPA.

command.py  options, the run, and how it is printed
machine.py  what is installed and what it runs on
checks.py   which cases a backend is held to, and the verdict
speed.py    four shapes against SDPA
worker.py   the process that runs kernels: a crash or a hang of one backend says nothing about the others
"""
