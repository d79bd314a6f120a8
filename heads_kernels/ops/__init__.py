"""The operators: each has a folder that declares it and its table of backends; modules here are shared."""
