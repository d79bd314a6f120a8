"""A pretrained model converted on some sentences, and what that does to others."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import heads_kernels as hk

pytestmark = pytest.mark.check

#: Mean cosine of the embeddings of 600 other sentences, which was measured with a calibration on 600 and as many
#: features in every layer. Here both are 100.
COSINES = {"cp": {256: 0.9982, 192: 0.9949}, "ragged": {256: 0.9974, 192: 0.9913}}
MARGIN = 0.0005


def loaded() -> tuple[Any, list[dict[str, Tensor]], dict[str, Tensor]]:
    """The model, four batches to calibrate with, and one to look at."""
    minilm = pytest.importorskip("benchmarks.minilm", reason="needs the extra bench")
    try:
        model = minilm.load()
        ids, lengths = minilm.tokens(200)
    except minilm.Unavailable as missing:
        pytest.skip(str(missing))
    real = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    batches = []
    for rows in [*torch.arange(100).split(25), torch.arange(100, 200)]:
        longest = int(lengths[rows].max())
        ids_and_mask = {"input_ids": ids[rows], "attention_mask": real[rows]}
        batches.append({name: each[:, :longest] for name, each in ids_and_mask.items()})
    return model, batches[:-1], batches[-1]


@torch.no_grad()
def embeddings(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The mean over tokens, of norm 1."""
    real = batch["attention_mask"][..., None]
    return torch.nn.functional.normalize((model(**batch)[0] * real).sum(1) / real.sum(1), dim=-1)


@pytest.mark.slow
@pytest.mark.parametrize("method", COSINES)
def test_sentences_stay_where_they_are(method: str) -> None:
    model, calibration, others = loaded()
    expected = embeddings(model, others)
    moments = hk.convert.calibrate(model, calibration)
    for dim, cosine in COSINES[method].items():
        converted = copy.deepcopy(model)
        found = hk.convert.collaborate(
            converted, dim, method=method, calibration=moments, iterations=30
        )
        assert sum(found.dims) <= 6 * dim
        assert (embeddings(converted, others) * expected).sum(1).mean() > cosine - MARGIN
        if method == "ragged":
            assert sum(report.executed_features for report in found.reports) < 6 * 384
        assert found.parameters < found.parameters_before
