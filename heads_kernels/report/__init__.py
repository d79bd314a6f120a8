"""`python -m heads_kernels report`: what the heads of a transformers model do on a text, as one page."""
