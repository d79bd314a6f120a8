"""What tests of transformers models share; without transformers there are none."""

import importlib.util
from typing import Any

import pytest
from torch import Tensor

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of every call of `gated_attention`."""
    from heads_kernels.integrations.transformers import attention

    seen, operator = [], attention.gated_attention

    def spy(**named: Any) -> Tensor:
        seen.append(named)
        return operator(**named)

    monkeypatch.setattr(attention, "gated_attention", spy)
    return seen
