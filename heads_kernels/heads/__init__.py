"""The heads of a model: where they lie, gating, closing, pruning and saving them."""

__all__: list[str] = []
