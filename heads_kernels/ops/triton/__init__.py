"""The Triton kernels of all operators.

A kernel takes no loose numbers: the operands of scores (`operands.Operands`), what its pass reads and writes (tensors,
or tuples in its own file), the numbers of the call (`operands.Sizes`), and one description of what it is compiled for,
`TILE` (`tiles.TileConstants`). Its functions take the same, and the place of the program (`operands.Place`).
Triton 3.6 and newer build named tuples in kernels and carry them through loops; a field may not be named `values` or
`type`, which Triton's own tuples have.
"""
