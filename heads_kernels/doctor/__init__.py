"""`python -m heads_kernels doctor`: every backend on this machine held to the accuracy rule, and timed against SDPA.

command.py  options, what is installed, the run, and how it is printed
checks.py   which cases a backend is held to, the verdict, and the processes that run kernels: a crash or a hang of one
            backend says nothing about the others
"""
