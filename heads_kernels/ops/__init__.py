"""The operators. Each folder holds its table of backends (`__init__`), its torch op (`op`) and its backends."""
