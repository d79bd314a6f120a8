"""What tests of transformers models share; without transformers there are none."""

import importlib.util
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]


@pytest.fixture
def calls() -> Iterator[list[Any]]:
    """Every call of `gated_attention`, with its arguments as `kwargs`."""
    from heads_kernels.integrations.transformers import attention

    with mock.patch.object(attention, "gated_attention", wraps=attention.gated_attention) as operator:
        yield operator.mock_calls
