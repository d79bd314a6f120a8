"""A model that is only read: in evaluation mode, its weights without gradients, and put back afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """In this block the model is in evaluation mode and its weights ask for no gradient; after it all is as before.

    Weights made under `torch.inference_mode()` stay as they are: they never take part in a gradient.
    """
    training = {module: module.training for module in model.modules()}
    asking = [p for p in model.parameters() if p.requires_grad and not p.is_inference()]
    try:
        model.eval()
        for parameter in asking:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)
        for module, mode in training.items():
            module.training = mode
