"""What the Triton kernels share: operands, loads, visible ranges, softmax, dropout, gates, tiles, launches."""
